"""Command that trains a retriever."""

import json
import logging
from typing import TYPE_CHECKING

from rheostat.flows.cli.options import Config, Named, Overrides, StoredIn, log_progress
from rheostat.flows.cli.prefect_api import prefect_api, run_flow
from rheostat.infra.terminal import Json, table, write

if TYPE_CHECKING:
    from rheostat.models.records.retrievals import TrainedRetriever

logger = logging.getLogger(__name__)


def retriever(
    config: Config, /, *overrides: Overrides, run: Named = None, store: StoredIn = None, as_json: Json = False
) -> None:
    """Train a retriever on pairs of queries and passages, and evaluate it, or continue its training."""
    from rheostat.tasks.config.retriever import load_retriever_config

    options = {"name": run, "store": store}
    options_given = [f"{key}={json.dumps(value)}" for key, value in options.items() if value is not None]
    loaded = load_retriever_config(config, [*overrides, *options_given])
    log_progress(quiet=as_json, verbosity="verbose")  # its worker is a thread, whose logs report the progress
    with prefect_api("rheostat.flows.retriever") as url:
        logger.info("Prefect's UI: %s", url.removesuffix("/api"))
        from rheostat.flows.retriever import retriever as retriever_flow

        result: TrainedRetriever = run_flow(retriever_flow(loaded))
    write(result.model_dump_json(indent=2) if as_json else _describe(result))


def _describe(result: "TrainedRetriever") -> str:
    lines = [f"\n{table(result.rows())}", f"chosen     {result.method} ({result.decision})"]
    return "\n".join([*lines, f"retriever  {result.path}", f"digest     {result.digest}"])
