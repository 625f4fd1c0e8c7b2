"""Files and names that pages of the documentation show."""

import re
from pathlib import Path

EXTENDING = Path(__file__).parents[2] / "docs/extending.md"
METRICS_PAGE = Path(__file__).parents[2] / "docs/metrics.md"


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


def documented_metrics() -> list[str]:
    """Return the names in the first columns of the tables in docs/metrics.md, such as `credit/term_<term>_mean`."""
    return re.findall(r"^\| `(prompts|tokens_per_second|[a-z]+/[^`]+)` \|", METRICS_PAGE.read_text(), re.MULTILINE)


def is_documented(name: str) -> bool:
    """Return whether docs/metrics.md explains a metric. Text in angle brackets matches any part of a name."""
    patterns = (re.sub(r"<\w+>", ".+", metric) for metric in documented_metrics())
    return any(re.fullmatch(pattern, name) for pattern in patterns)
