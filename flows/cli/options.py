"""Arguments and options that several commands have."""

import logging
import sys
from pathlib import Path
from typing import Annotated, TextIO

from cyclopts import Parameter
from cyclopts.completion import CompletionContext

DEFAULT_STORE = "./runs"
PACKAGES = ("flows", "tasks", "models", "placement", "infra")


def _known_runs(context: CompletionContext) -> list[str]:
    """Names for the shell, from the store that was named so far."""
    from infra.store.runs import list_runs

    return list_runs(context["store"].value or DEFAULT_STORE)


RunName = Annotated[str, Parameter(name="RUN", help="name of the run", completer=_known_runs)]
RunNames = Annotated[
    str, Parameter(name="RUN", show_default="all of the store", help="names of runs", completer=_known_runs)
]
Store = Annotated[str, Parameter(help="where runs lie: a directory, or s3://bucket/prefix")]
Config = Annotated[Path, Parameter(name="CONFIG", help="TOML file")]
Overrides = Annotated[
    str,
    Parameter(
        name="KEY=VALUE",
        help="dotted keys of the configuration, such as update.learning_rate=1e-4; `key=` goes back to the default",
    ),
]
Iteration = Annotated[int | None, Parameter(metavar="N", show_default="the last one", help="iteration to read")]
Named = Annotated[str | None, Parameter(metavar="NAME", show_default="the configuration's", help="name of the run")]
StoredIn = Annotated[str | None, Parameter(show_default="the configuration's", help="where runs lie")]
Scores = Annotated[str | None, Parameter(metavar="NAME", show_default="the run's own scores", help="a re-scoring")]


def log_progress(*, quiet: bool) -> None:
    """Show the reports of tasks, and warnings of every package, as plain lines; on stderr where stdout is for JSON."""
    _log_to(sys.stderr if quiet else sys.stdout)


def _log_to(stream: TextIO) -> None:
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(message)s"))
    for package in PACKAGES:
        logger = logging.getLogger(package)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
