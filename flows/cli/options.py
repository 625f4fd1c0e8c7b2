"""Arguments and options that several commands have."""

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.completion import CompletionContext

from infra.errors import BadInput
from infra.plugins import PACKAGES
from infra.terminal import parse_port, parse_whole_number, wrapped
from infra.untrusted_text import visible

DEFAULT_STORE = "./runs"


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
Iteration = Annotated[
    int | None,
    Parameter(converter=parse_whole_number, metavar="N", show_default="the last one", help="iteration to read"),
]
Named = Annotated[str | None, Parameter(metavar="NAME", show_default="the configuration's", help="name of the run")]
StoredIn = Annotated[str | None, Parameter(show_default="the configuration's", help="where runs lie")]
Scores = Annotated[str | None, Parameter(metavar="NAME", show_default="the run's own scores", help="a re-scoring")]


Verbosity = Literal["quiet", "normal", "verbose"]


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Display:
    """What a command shows while it works."""

    quiet: Annotated[bool, Parameter(help="only warnings, and the result")] = False
    verbose: Annotated[bool, Parameter(help="reports of workers in threads too, and no live page")] = False
    port: Annotated[
        int | None,
        Parameter(converter=parse_port, show_default="4200, or any free one", help="port of Prefect's UI on loopback"),
    ] = None

    @property
    def verbosity(self) -> Verbosity:
        """How much is told. Raises BadInput where two say otherwise."""
        if self.quiet and self.verbose:
            raise BadInput("--quiet and --verbose: expected one of them")
        return "quiet" if self.quiet else "verbose" if self.verbose else "normal"


AS_USUAL = Display()


class Lines(logging.Handler):
    """Hands reports of tasks, and warnings of every package, to who prints them; workers' own where that is wanted."""

    def __init__(self, write: Callable[[str, int], None], verbosity: Verbosity = "normal") -> None:
        super().__init__()
        self._write, self._verbosity = write, verbosity

    def emit(self, record: logging.LogRecord) -> None:
        """Hand on one report with its level."""
        least = {"quiet": logging.WARNING, "normal": logging.INFO, "verbose": logging.INFO}[self._verbosity]
        if record.name.startswith("models.") and self._verbosity == "normal":
            least = logging.WARNING
        if record.levelno < least:
            return
        try:
            warned = "warning: " if record.levelno == logging.WARNING else ""
            self._write(visible(f"{warned}{record.getMessage()}{self.suffix(record)}"), record.levelno)
        except Exception:
            self.handleError(record)

    def suffix(self, record: logging.LogRecord) -> str:
        """What is left of an iteration's run, which a live page shows by itself."""
        return f"  eta {record.eta}" if hasattr(record, "eta") else ""


def log_progress(*, quiet: bool, verbosity: Verbosity = "normal") -> None:
    """Show the reports of tasks, and warnings of every package, as plain lines; on stderr where stdout is for JSON."""
    stream = sys.stderr if quiet else sys.stdout

    def write(line: str, _: int) -> None:
        stream.write(f"{wrapped(line)}\n")
        stream.flush()

    attach(Lines(write, verbosity))


def attach(handler: logging.Handler) -> None:
    """Have a handler hear of all packages, and nobody above it."""
    for package in PACKAGES:
        logger = logging.getLogger(package)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


def detach(handler: logging.Handler) -> None:
    """Have a handler hear no more."""
    for package in PACKAGES:
        logging.getLogger(package).removeHandler(handler)
