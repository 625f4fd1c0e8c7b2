"""Commands in a terminal: an app that reports errors in one line, and functions that print text and tables."""

import os
import re
import shlex
import shutil
import signal
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TextIO, get_args, get_origin

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    Parameter,
    Token,
    UnknownOptionError,
    UnusedCliTokensError,
)

from rheostat.infra.errors import BadInput, DeprecatedSpelling, RheostatError
from rheostat.infra.untrusted_text import make_visible

if TYPE_CHECKING:
    from rich.console import Console

WIDTH: Final = 100
"""Maximum width of the output in characters, even if the terminal is wider."""

GAP: Final = "  "
"""Text between two columns of a table."""

Json = Annotated[bool, Parameter(name="--json", help="print JSON")]
"""Option `--json`, which most commands have."""

MAX_PORT: Final = 65535


def parse_whole_number(kind: object, tokens: Sequence[Token]) -> int:
    """Convert the value of a command-line option to an integer. Raises CoercionError if it is not a whole number. (By
    default, cyclopts would round 1.5 to 2.)"""
    if re.fullmatch(r"[+-]?[0-9]{1,18}", tokens[0].value) is None:
        raise CoercionError(token=tokens[0], target_type=int)
    return int(tokens[0].value)


def parse_port(kind: object, tokens: Sequence[Token]) -> int:
    """Convert the value of a command-line option to a port number. Raises CoercionError if it is not between 1 and
    65535."""
    port = parse_whole_number(kind, tokens)
    if port == 0:
        raise CoercionError(
            msg=f"expected a port from 1 to {MAX_PORT}: 0 takes any free port, which clients could not know",
            token=tokens[0],
            target_type=int,
        )
    if not 1 <= port <= MAX_PORT:
        raise CoercionError(msg=f"expected a port from 1 to {MAX_PORT}", token=tokens[0], target_type=int)
    return port


def parse_port_or_free(kind: object, tokens: Sequence[Token]) -> int:
    """Convert the value of a command-line option to a port number, where 0 means any unused port. Raises CoercionError
    if it is not a valid port."""
    return 0 if tokens[0].value == "0" else parse_port(kind, tokens)


KINDS = {int: "a whole number", float: "a number"}


def command_app(name: str, summary: str, *, version: Callable[[], str] | None = None, example: str = "") -> App:
    """Create a command-line app without commands. `summary` is the first line of its help, `version` returns the text
    of `--version`, and `example` is shown at the end of the help."""
    return App(
        name=name,
        help=summary,
        help_format="plaintext",
        help_epilogue=example,
        version=version,
        version_flags="--version" if version else (),
        # Flags have no --no-… form. If an option is repeated, the last value counts.
        default_parameter=Parameter(negative=(), allow_repeating=True, show_default=_format_default),
        print_error=False,
        exit_on_error=False,
        suppress_keyboard_interrupt=False,
        result_action="return_value",
    )


def run_command(app: App, arguments: Sequence[str] | None, *, again: str) -> int:
    """Run one command of an app and return its exit code. `again` is a hint on how to continue, which is printed after
    an interrupt. `arguments` defaults to `sys.argv[1:]`.

    The code is 2 for wrong input, 3 for a spent budget, 4 for an alarm that ends a run, 1 for other errors, and 130 or
    143 for a signal.
    """
    program = app.name[0]
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        _check_command(app, words)
        with _print_deprecations():
            return int(app(words) or 0)
    except CycloptsError as error:
        command = " ".join([program, *(error.command_chain or ())])
        write_error(f"{program}: {_describe_error(error)} (see `{command} --help`)")
        return 2
    except RheostatError as error:
        write_error(f"{program}: {' '.join(str(error).split())}")
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        write_error(f"{program}: interrupted; {again}")
        return 128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)
    except BrokenPipeError:  # the reader of our output, such as `| head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # drop the output that is still buffered
        return 0
    except Exception:  # a defect, whose traceback may quote untrusted text
        write_error(traceback.format_exc().rstrip("\n"))
        return 1


@contextmanager
def _print_deprecations() -> Iterator[None]:
    """Run the block, and print one line to stderr for each deprecated name or path in a configuration. The same line is
    printed only once."""
    printed = set[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("always", DeprecatedSpelling)
        show_other = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **options: Any) -> None:  # noqa: ANN401
            if not issubclass(category, DeprecatedSpelling):
                show_other(message, category, *place, **options)
            elif str(message) not in printed:
                printed.add(str(message))
                write_error(f"warning: {message}")

        warnings.showwarning = show
        yield


def _check_command(app: App, words: Sequence[str]) -> None:
    """Raise BadInput if the words on the command line do not name a command. Without this check, cyclopts would answer
    an unknown command with `--help` by printing the help of the parent command."""
    parents = [app.name[0]]
    for word in words:
        known = command_names(app)
        if not known or word.startswith(("-", "__")):  # shell completion runs the command `__complete`
            return
        if word not in known:
            from rheostat.infra.validation_errors import nearest

            hint = f"{nearest(word, known)} (see `{' '.join(parents)} --help`)"
            raise BadInput(f"unknown command {word!r}: expected {', '.join(known)}{hint}")
        app = app[word]
        parents.append(word)


def command_names(app: App) -> list[str]:
    """Return the names of all commands of an app. Options such as `--help` are not included."""
    return [name for name in app if not name.startswith("-")]


def write(text: str, *, is_styled: bool = False) -> None:
    """Print a text to stdout and flush it, so that a program that reads the output gets it immediately.

    Control characters are escaped, because policies, servers and files may contain any text. If the text is styled, the
    caller must escape them.
    """
    sys.stdout.write(f"{text if is_styled else make_visible(text)}\n")
    sys.stdout.flush()


def write_error(text: str) -> None:
    """Print a line to stderr, with control characters escaped."""
    sys.stderr.write(f"{make_visible(text)}\n")


def console(stream: TextIO | None = None) -> "Console":
    """Return a Rich console that prints to a stream (default: stdout). It uses no colors if the stream is not a
    terminal or NO_COLOR is set."""
    from rich.console import Console

    result = Console(file=stream or sys.stdout, highlight=False, markup=False, emoji=False)
    result.width = min(WIDTH, result.width) if result.is_terminal else WIDTH
    return result


def terminal_width() -> int | None:
    """Return the width of the terminal in characters, or None if stdout is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def wrap_text(text: str, *, indent: int = 9) -> str:
    """Break long lines of a text between words. The continuation lines are indented by `indent` spaces."""
    width = min(WIDTH, terminal_width() or WIDTH)
    broken = (
        textwrap.wrap(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    )
    return "\n".join("\n".join(lines) for lines in broken)


def fit_text(text: str) -> str:
    """Break lines of a text that are wider than the terminal. Return the text unchanged if stdout is a file or a
    pipe."""
    return text if terminal_width() is None else wrap_text(text)


def table(rows: Sequence[dict[str, str]], *, drop_first: Sequence[str] = (), width: int | None = None) -> str:
    """Format rows as a table with a header. Keys of the rows are the column headings. The first column is aligned to
    the left, and the others to the right. Columns that do not fit are omitted.

    The table is at most `width` characters wide (default: the width of the terminal, unlimited in a file or a pipe).
    Columns that do not fit are omitted, and a last line lists them. The columns in `drop_first` are omitted first, in
    this order, and then the others from the right. The first column is never omitted.
    """
    if not rows:
        return ""
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    first, *others = widths
    kept, room = {first}, (width or terminal_width() or sys.maxsize) - widths[first]
    for name in [
        *(name for name in others if name not in drop_first),
        *reversed([n for n in drop_first if n in others]),
    ]:
        if widths[name] + len(GAP) <= room:
            kept.add(name)
            room -= widths[name] + len(GAP)
    lines = [
        _row(line, {name: widths[name] for name in widths if name in kept}) for line in ({n: n for n in widths}, *rows)
    ]
    omitted = [name for name in widths if name not in kept]
    if omitted:
        lines.append(
            wrap_text(
                f"columns that do not fit: {', '.join(omitted)} (widen the terminal or pipe the output to see all)"
            )
        )
    return "\n".join(lines)


def _row(cells: Mapping[str, str], widths: Mapping[str, int]) -> str:
    first, *others = ((cells[name], width) for name, width in widths.items())
    return GAP.join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]).rstrip()


def _describe_error(error: CycloptsError) -> str:
    """Return a message about an invalid command line: the expected value, the actual value and the most similar valid
    name."""
    from rheostat.infra.validation_errors import nearest

    match error:
        case UnknownOptionError(token=token):
            options = [name for argument in error.argument_collection for name in argument.names if name[:2] == "--"]
            return f"unrecognized arguments: {token.keyword or token.value}{nearest(token.value, options)}"
        case UnusedCliTokensError(unused_tokens=[*unused]):
            return f"unrecognized arguments: {shlex.join(unused)}"
        case MissingArgumentError(keyword=str(option)):
            return f"{option} needs a value"
        case MissingArgumentError(argument=argument) if argument is not None:
            return f"the following arguments are required: {argument.name}"
        case CoercionError(token=token, target_type=kind) if token is not None:
            name = token.keyword or (error.argument.name if error.argument else "argument")
            if get_origin(kind) is Literal:
                choices = [str(choice) for choice in get_args(kind)]
                return f"{name} {token.value!r}: expected {', '.join(choices)}{nearest(token.value, choices)}"
            if error.msg:
                return f"{name} {token.value!r}: {error.msg}"
            return f"{name} {token.value!r}: expected {KINDS.get(kind, 'no value') if kind else 'another value'}"
    error.verbose = False
    return " ".join(str(error).split())


def _format_default(value: object) -> str | None:
    """Return the default value of an option as it is shown in the help. Return None if nothing is shown, which is the
    case for a flag that is off, an empty list and None."""
    return None if value is None or value is False or value == () else str(value)
