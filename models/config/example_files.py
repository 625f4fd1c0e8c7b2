"""Configuration of files with training examples that begin with a prompt. Torch-free."""

from typing import Annotated, ClassVar

from pydantic import Field, field_validator

from rheostat.infra.store.inputs import DataLocation
from rheostat.models.config.chat_files import ChatFile
from rheostat.models.config.file_rules import DropReason, FileRules
from rheostat.models.config.hub_datasets import HubDatasetChoice


class ExampleFile(HubDatasetChoice, ChatFile, FileRules):
    """Fields common to files of examples on which a model is trained. No prompt is in both splits."""

    table: ClassVar[str]
    """Name of the configuration table in messages, such as "preferences"."""
    noun: ClassVar[str]
    """Singular noun for one example in messages."""

    drop: tuple[DropReason, ...] = ()
    """Kinds of rows that are left out instead of refusing the file."""
    path: DataLocation
    """File or folder of training data, on this machine or at s3://bucket/name, in a format that `[data]` reads. Or the
    name of a dataset on the Hugging Face Hub."""
    heldout_path: DataLocation | None = None
    """File or folder of evaluation data. If not set, `heldout_fraction` of the training data is kept."""
    heldout_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Share of the rows kept for evaluation if there is no second file. A hash of the prompt selects the rows."""
    template: str = "{prompt}"
    """Template into which a plain-text prompt is inserted; `{prompt}` is replaced by the text of the column."""

    @field_validator("template")
    @classmethod
    def _require_prompt(cls, template: str) -> str:
        if "{prompt}" not in template:
            raise ValueError(
                f"the template {template!r} does not contain {{prompt}}, so all prompts would be the same. Add "
                "{prompt} to the template"
            )
        return template
