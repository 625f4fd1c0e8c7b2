"""The files that a page of the documentation shows."""

import re
from pathlib import Path

EXTENDING = Path(__file__).parents[2] / "docs/extending.md"


def files_of(page: Path) -> dict[str, str]:
    """Put together every fenced block that begins with `# name.py` or `# name.toml`, by that name."""
    files: dict[str, str] = {}
    for block in re.findall(r"^```(?:python|toml)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
        if named := re.match(r"# (\w+\.(?:py|toml))\n", block):
            files[named[1]] = files.get(named[1], "") + block[named.end() :] + "\n"
    return files


def write_page(page: Path, folder: Path) -> None:
    """Write the files of a page into a folder."""
    for name, text in files_of(page).items():
        (folder / name).write_text(text)
