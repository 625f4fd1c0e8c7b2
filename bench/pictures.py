"""Image of a terminal for the documentation, which `make screenshots` generates from a real run."""

import io
import os
import re
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from rheostat.infra.terminal import WIDTH
from tests.support.jobs import RHEOSTAT, ROOT
from tests.support.terminal import on_terminal, screen

MOMENT = "12 of 24 iterations"
"""Progress text in the terminal that selects the moment of the image.

The image is taken when a generation speed follows this text.
"""


class MomentReached(Exception):
    """Raised when the demo's terminal output reaches the moment for the picture. The argument is the output so far."""


def check_moment(sent: str) -> None:
    """Raise `MomentReached` if the terminal output `sent` has reached the moment at which the image is taken."""
    if "tokens/s" in sent.partition(MOMENT)[2]:
        raise MomentReached(sent)


def draw(sent: str, path: Path, *, title: str) -> None:
    """Write the contents of the terminal as an SVG image, without the line of the password and without external fonts.

    `sent` is all output that was sent to the terminal.
    """
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for line in (line for line in screen(sent) if "password" not in line):
        console.print(Text.from_ansi(line), no_wrap=True, crop=False)
    svg = re.sub(r"@font-face \{.*?\}", "", console.export_svg(title=title, theme=MONOKAI), flags=re.DOTALL)
    path.write_text(svg.replace("Fira Code", "monospace"))


def main(*arguments: str) -> None:
    """Run the demo in a terminal and write an image of it to docs/pictures/terminal.svg.

    Further arguments are passed to `rheostat train`.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        os.chdir(home)
        command = [RHEOSTAT, "train", str(ROOT / "configs/demo.toml"), "--store", "runs", *arguments]
        try:
            on_terminal(command, seen=check_moment)
        except MomentReached as taken:
            draw(str(taken), ROOT / "docs/pictures/terminal.svg", title="make demo")
            return
    raise SystemExit(f"the demo ended before it showed {MOMENT!r}, so there is no screenshot")


if __name__ == "__main__":
    main(*sys.argv[1:])
