"""Reader of the configuration of a retriever from a TOML file."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from rheostat.infra.errors import BadInput
from rheostat.infra.validation_errors import explain
from rheostat.models.config.retriever import RetrieverConfig
from rheostat.tasks.config.documents import apply_overrides, place_overrides, read_document


def load_retriever_config(path: Path, overrides: Sequence[str] = ()) -> RetrieverConfig:
    """Read the configuration of a retriever from a TOML file and overrides. Raises BadInput if anything is wrong."""
    placed_overrides = place_overrides(overrides, Path.cwd(), job=path.parent)
    try:
        document = apply_overrides(read_document(path, RetrieverConfig), placed_overrides, RetrieverConfig)
        return RetrieverConfig.model_validate(document)
    except ValidationError as error:
        raise BadInput(f"{path}: {explain(error, RetrieverConfig)}") from None
