"""A command on a real pseudo-terminal, and its visible output."""

import fcntl
import os
import pty
import re
import struct
import termios
from collections.abc import Callable, Mapping, Sequence

COLUMNS = 120
"""Rows of the terminal: more than we use."""
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_MOVES = re.compile(r"\x1b\[(?P<count>\d*)(?P<move>[A-Za-z])|\x1b\[\?\d+[hl]|(?P<step>[\r\n])")


def on_terminal(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    seen: Callable[[str], None] = lambda text: None,
    columns: int = COLUMNS,
) -> tuple[int, str]:
    """Run a command to its end on a terminal. Return its exit code and all output.

    `seen` is called with the output so far after each piece; if it raises, the command loses its terminal.
    """
    child, terminal = pty.fork()
    if child == 0:
        told = {**os.environ, "TERM": "xterm-256color", **(env or {}), "COLUMNS": str(columns)}  # xdist says 80
        os.execvpe(command[0], [*command], told)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    sent = b""
    try:
        while piece := _read(terminal):
            sent += piece
            seen(sent.decode(errors="ignore"))
    finally:
        os.close(terminal)
        _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), sent.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # its last process has gone
        return b""


def screen(sent: str) -> list[str]:
    """Return the lines that are visible after this output, with their colours."""
    lines, row, at = [""], 0, 0
    for found in _MOVES.finditer(sent):
        lines[row] += sent[at : found.start()]
        at = found.end()
        if found["step"] == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif found["move"] == "A":
            row = max(0, row - int(found["count"] or 1))
        elif found["move"] == "K":
            lines[row] = ""
        elif found["move"] == "m":
            lines[row] += found[0]
    lines[row] += sent[at:]
    return lines


def plain_screen(lines: Sequence[str]) -> list[str]:
    """Return the visible lines without colours."""
    return [COLOUR.sub("", line).rstrip() for line in lines]
