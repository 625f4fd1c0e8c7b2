"""Arguments and options shared by several commands, and the output of log records."""

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.completion import CompletionContext

from rheostat.infra.errors import BadInput
from rheostat.infra.former_names import PACKAGE
from rheostat.infra.terminal import WIDTH, parse_port, parse_whole_number, wrap_text
from rheostat.infra.untrusted_text import make_visible

DEFAULT_STORE = "./runs"


def format_next_steps(steps: Mapping[str, str]) -> str:
    """Format suggested commands for the end of a command's output. `steps` maps the purpose of each command to the
    command."""
    return "next     " + "\n         ".join(
        line if len(line := f"{command}    {what}") <= WIDTH - 9 else f"{what}:\n           {command}"
        for what, command in steps.items()
    )


def _known_runs(context: CompletionContext) -> list[str]:
    """Return the run names for shell completion. They are read from the store that the user has typed in the command
    line so far, or from the default store."""
    from rheostat.infra.store.runs import list_runs

    return list_runs(context["store"].value or DEFAULT_STORE)


RunName = Annotated[str, Parameter(name="RUN", help="name of the run", completer=_known_runs)]
RunNames = Annotated[
    str, Parameter(name="RUN", show_default="all runs of the store", help="names of the runs", completer=_known_runs)
]
Store = Annotated[str, Parameter(help="store with the runs: a directory, s3://bucket/prefix or az://container/prefix")]
Config = Annotated[Path, Parameter(name="CONFIG", help="configuration file in TOML")]
Overrides = Annotated[
    str,
    Parameter(
        name="KEY=VALUE",
        help="override keys of the configuration, such as update.learning_rate=1e-4; `key=` restores the default",
    ),
]
Iteration = Annotated[
    int | None,
    Parameter(
        converter=parse_whole_number, metavar="N", show_default="the last", help="number of the iteration to read"
    ),
]
Named = Annotated[str | None, Parameter(metavar="NAME", show_default="from the configuration", help="name of the run")]
StoredIn = Annotated[str | None, Parameter(show_default="from the configuration", help="store with the runs")]
Scores = Annotated[
    str | None,
    Parameter(metavar="NAME", show_default="the run's own scores", help="name of a rescoring whose scores are used"),
]


Verbosity = Literal["quiet", "normal", "verbose"]


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Display:
    """Options that control what a command prints while it runs."""

    quiet: Annotated[bool, Parameter(help="print only warnings and the result")] = False
    verbose: Annotated[bool, Parameter(help="print the logs of workers in threads too, without a live page")] = False
    port: Annotated[
        int | None,
        Parameter(converter=parse_port, show_default="4200, or any free port", help="local port of Prefect's UI"),
    ] = None

    @property
    def verbosity(self) -> Verbosity:
        """Amount of output of a command: "quiet", "normal" or "verbose". Raises BadInput if both --quiet and --verbose
        are given."""
        if self.quiet and self.verbose:
            raise BadInput("--quiet and --verbose cannot be combined. Use only one of them.")
        return "quiet" if self.quiet else "verbose" if self.verbose else "normal"


DEFAULT_DISPLAY = Display()


class LineHandler(logging.Handler):
    """Logging handler that formats log records of Rheostat as lines, and passes each line with its level to
    a function that prints it.

    Records of workers in threads are included only with verbosity "verbose".
    """

    def __init__(self, write: Callable[[str, int], None], verbosity: Verbosity = "normal") -> None:
        super().__init__()
        self._write, self._verbosity = write, verbosity

    def emit(self, record: logging.LogRecord) -> None:
        """Format one log record as a line, and pass the line to the function that prints it. Records below the level of
        the chosen verbosity are dropped."""
        min_level = {"quiet": logging.WARNING, "normal": logging.INFO, "verbose": logging.INFO}[self._verbosity]
        if record.name.startswith("rheostat.models.") and self._verbosity == "normal":
            min_level = logging.WARNING
        if record.levelno < min_level:
            return
        try:
            prefix = "warning: " if record.levelno == logging.WARNING else ""
            self._write(make_visible(f"{prefix}{record.getMessage()}{self.suffix(record)}"), record.levelno)
        except Exception:
            self.handleError(record)

    def suffix(self, record: logging.LogRecord) -> str:
        """Return the predicted remaining time of the run ("  eta 0:05:00") if the record contains it, otherwise ""."""
        return f"  eta {record.eta}" if hasattr(record, "eta") else ""


def log_progress(*, quiet: bool, verbosity: Verbosity = "normal") -> None:
    """Print log records of Rheostat as plain lines, to stderr if `quiet`, otherwise to stdout."""
    stream = sys.stderr if quiet else sys.stdout

    def write(line: str, _: int) -> None:
        stream.write(f"{wrap_text(line)}\n")
        stream.flush()

    attach_handler(LineHandler(write, verbosity))


def attach_handler(handler: logging.Handler) -> None:
    """Send the log records of Rheostat to this handler, and no longer to the root logger."""
    logger = logging.getLogger(PACKAGE)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def detach_handler(handler: logging.Handler) -> None:
    """Remove a handler from Rheostat's logger."""
    logging.getLogger(PACKAGE).removeHandler(handler)
