"""A command at a terminal: an app whose complaints are one line, and what it prints."""

import os
import shlex
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Final, Literal, TextIO, get_args, get_origin

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    Parameter,
    UnknownOptionError,
    UnusedCliTokensError,
)

from infra.errors import RheostatError

if TYPE_CHECKING:
    from rich.console import Console

WIDTH: Final = 100
"""Columns that output takes at most, however wide a terminal is."""

GAP: Final = "  "
"""Between the columns of a table."""

Json = Annotated[bool, Parameter(name="--json", help="print JSON")]
"""An option that most commands have."""

KINDS = {int: "a whole number", float: "a number"}


def command_app(name: str, summary: str, *, version: Callable[[], str] | None = None, example: str = "") -> App:
    """Make an app, to which commands are added, or with one function as its default."""
    return App(
        name=name,
        help=summary,
        help_format="plaintext",
        help_epilogue=example,
        version=version,
        version_flags="--version" if version else (),
        # Flags have no --no-…, and of an option that is given twice the last counts.
        default_parameter=Parameter(negative=(), allow_repeating=True, show_default=_shown_default),
        print_error=False,
        exit_on_error=False,
        suppress_keyboard_interrupt=False,
        result_action="return_value",
    )


def run_command(app: App, arguments: Sequence[str] | None, *, again: str) -> int:
    """Run one command. Exit code 2 for what the user wrote, 3 for a spent budget, 4 for an alarm that ends
    a run, 1 for what else went wrong, 130 or 143 for a signal.

    `again` is said when it was interrupted.
    """
    program = app.name[0]
    try:
        return int(app(sys.argv[1:] if arguments is None else list(arguments)) or 0)
    except CycloptsError as error:
        command = " ".join([program, *(error.command_chain or ())])
        sys.stderr.write(f"{program}: {_complaint(error)} (see `{command} --help`)\n")
        return 2
    except RheostatError as error:
        sys.stderr.write(f"{program}: {' '.join(str(error).split())}\n")
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        sys.stderr.write(f"{program}: interrupted; {again}\n")
        return 128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)
    except BrokenPipeError:  # the reader of our output (`| head`) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered has nowhere to go
        return 0


def command_names(app: App) -> list[str]:
    """Name the commands of an app."""
    return [name for name in app if not name.startswith("-")]


def write(text: str) -> None:
    """Print one piece of output at once, so that a reader of our pipe sees it when it is made."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def console(stream: TextIO | None = None) -> "Console":
    """Open a terminal, or what stands in its place: without colours where it is none, or NO_COLOR is set."""
    from rich.console import Console

    made = Console(file=stream or sys.stdout, highlight=False, markup=False, emoji=False)
    made.width = min(WIDTH, made.width) if made.is_terminal else WIDTH
    return made


def visible(text: str) -> str:
    """A policy may write anything: control characters are shown, not obeyed by the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t " else f"\\x{ord(c):02x}" for c in text)


def terminal_width() -> int | None:
    """Return the columns of the terminal, or None if the output goes to a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def wrapped(text: str, *, indent: int = 9) -> str:
    """Break a text's long lines between words."""
    width = min(WIDTH, terminal_width() or WIDTH)
    broken = (
        textwrap.wrap(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    )
    return "\n".join("\n".join(lines) for lines in broken)


def fitted(text: str) -> str:
    """Break lines that are too long for the terminal between words; a file or a pipe gets them whole."""
    return text if terminal_width() is None else wrapped(text)


def table(rows: Sequence[dict[str, str]], *, least: Sequence[str] = (), width: int | None = None) -> str:
    """Return columns under their names: the first to the left, the others to the right.

    The table has at most `width` columns of text (default: those of the terminal; any number in a file or a pipe).
    Columns for which there is no room are left out, and a last line names them. Those in `least` are left out first,
    in that order, then the others from the right. The first column stays.
    """
    if not rows:
        return ""
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    first, *others = widths
    kept, room = {first}, (width or terminal_width() or sys.maxsize) - widths[first]
    for name in [*(name for name in others if name not in least), *reversed([n for n in least if n in others])]:
        if widths[name] + len(GAP) <= room:
            kept.add(name)
            room -= widths[name] + len(GAP)
    lines = [
        _row(line, {name: widths[name] for name in widths if name in kept}) for line in ({n: n for n in widths}, *rows)
    ]
    left_out = [name for name in widths if name not in kept]
    if left_out:
        lines.append(
            wrapped(f"not shown for lack of room: {', '.join(left_out)} (a wider terminal or a pipe shows all)")
        )
    return "\n".join(lines)


def _row(cells: Mapping[str, str], widths: Mapping[str, int]) -> str:
    first, *others = ((cells[name], width) for name, width in widths.items())
    return GAP.join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]).rstrip()


def _complaint(error: CycloptsError) -> str:
    """What was expected, what came, and the nearest name."""
    from infra.validation_errors import nearest

    match error:
        case UnusedCliTokensError(unused_tokens=[given, *_], app=App() as app) if known := command_names(app):
            return f"command {given!r}: expected {', '.join(known)}{nearest(given, known)}"
        case UnknownOptionError(token=token):
            options = [name for argument in error.argument_collection for name in argument.names if name[:2] == "--"]
            return f"unrecognized arguments: {token.keyword or token.value}{nearest(token.value, options)}"
        case UnusedCliTokensError(unused_tokens=[*unused]):
            return f"unrecognized arguments: {shlex.join(unused)}"
        case MissingArgumentError(keyword=str(option)):
            return f"{option}: expected a value"
        case MissingArgumentError(argument=argument) if argument is not None:
            return f"the following arguments are required: {argument.name}"
        case CoercionError(token=token, target_type=kind) if token is not None:
            name = token.keyword or (error.argument.name if error.argument else "argument")
            if get_origin(kind) is Literal:
                choices = [str(choice) for choice in get_args(kind)]
                return f"{name} {token.value!r}: expected {', '.join(choices)}{nearest(token.value, choices)}"
            return f"{name} {token.value!r}: expected {KINDS.get(kind, 'no value') if kind else 'another value'}"
    error.verbose = False
    return " ".join(str(error).split())


def _shown_default(value: object) -> str | None:
    """A default for the help; a flag that is not given is off, and nothing is nothing."""
    return None if value is None or value is False else str(value)
