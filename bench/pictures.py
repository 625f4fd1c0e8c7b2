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

from infra.terminal import WIDTH
from tests.support.jobs import RHEOSTAT, ROOT
from tests.support.terminal import on_terminal, screen

MOMENT = "12 of 24 iterations"
"""Text after which the image is taken as soon as the terminal shows the generation speed."""


class MomentReached(Exception):
    """Raised when it is time for the image, with the terminal's output so far."""


def check_moment(sent: str) -> None:
    """Raise `MomentReached` when it is time for the image."""
    if "tokens/s" in sent.partition(MOMENT)[2]:
        raise MomentReached(sent)


def draw(sent: str, path: Path, *, title: str) -> None:
    """Write the terminal's contents as an SVG image, without the password and without external fonts."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for line in (line for line in screen(sent) if "password" not in line):
        console.print(Text.from_ansi(line), no_wrap=True, crop=False)
    svg = re.sub(r"@font-face \{.*?\}", "", console.export_svg(title=title, theme=MONOKAI), flags=re.DOTALL)
    path.write_text(svg.replace("Fira Code", "monospace"))


def main(*arguments: str) -> None:
    """Run the demo on a terminal and write docs/pictures/terminal.svg. Further arguments are passed to the run."""
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
