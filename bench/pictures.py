"""Pictures of what a terminal shows, for the documentation: `make screenshots` draws them from a real run."""

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
"""From when on the page is drawn as soon as it shows how fast tokens are generated."""


class Taken(Exception):
    """What the terminal was sent until the picture."""


def look(sent: str) -> None:
    """Take the picture when it is time."""
    if "tokens/s" in sent.partition(MOMENT)[2]:
        raise Taken(sent)


def draw(sent: str, path: Path, *, title: str) -> None:
    """Write the terminal as a picture, without its password and without fonts from elsewhere."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for line in (line for line in screen(sent) if "password" not in line):
        console.print(Text.from_ansi(line), no_wrap=True, crop=False)
    svg = re.sub(r"@font-face \{.*?\}", "", console.export_svg(title=title, theme=MONOKAI), flags=re.DOTALL)
    path.write_text(svg.replace("Fira Code", "monospace"))


def main(*arguments: str) -> None:
    """Run the demo on a terminal and draw docs/pictures/terminal.svg; further arguments are the run's."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        os.chdir(home)
        command = [RHEOSTAT, "train", str(ROOT / "configs/demo.toml"), "--store", "runs", *arguments]
        try:
            on_terminal(command, seen=look)
        except Taken as taken:
            draw(str(taken), ROOT / "docs/pictures/terminal.svg", title="make demo")
            return
    raise SystemExit(f"the demo ended before its picture was taken, after {MOMENT!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
