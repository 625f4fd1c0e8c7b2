"""Screenshots of reports for the documentation. `make screenshots` first trains the two runs that are shown."""

import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.support.browsers import OpenedPage, open_page

HOME: Final = Path(__file__).parents[1]
STORE: Final = HOME / "build" / "screenshots"
PICTURES: Final = HOME / "docs" / "pictures"
RUNS: Final = {"judge": ("configs/judge.toml",), "demo": ("configs/demo.toml", "iterations=12")}
RHEOSTAT: Final = str(Path(sys.executable).with_name("rheostat"))


def main() -> None:
    """Train the runs that do not exist yet, build their report pages, and save screenshots in docs/pictures/."""
    for name, words in RUNS.items():
        if not (STORE / name / "run.json").exists():
            _rheostat("train", *words, "report=false")
    report, comparison = STORE / "report.html", STORE / "compared.html"
    _rheostat("report", "judge", "--to", str(report))
    _rheostat("compare", *RUNS, "--to", str(comparison))
    for scheme in ("light", "dark"):
        with open_page(report, scheme=scheme) as session:
            _photograph(session, "verdict", f"report-{scheme}")
    with open_page(report) as session:
        session.page.select_option("#batch", "it-0001")
        session.page.select_option("#beside", "it-0024")
        session.page.select_option("#order", "spread")
        session.page.select_option("#tint", "advantage")
        _photograph(session, "samples", "report-completions")
        _photograph(session, "slots", "report-workers")
    with open_page(comparison) as session:
        _photograph(session, "verdict", "report-compared")


def _rheostat(command: str, *words: str) -> None:
    subprocess.run([RHEOSTAT, command, *words, "--store", str(STORE)], cwd=HOME, check=True)


def _photograph(seen: OpenedPage, section: str, name: str) -> None:
    """Save a screenshot of a browser page, scrolled to the element with the ID `section`, as docs/pictures/NAME.png.

    Raises AssertionError if the page has reported errors.
    """
    assert seen.complaints == [], seen.complaints
    seen.page.evaluate("section => document.getElementById(section).scrollIntoView()", section)
    seen.page.screenshot(path=PICTURES / f"{name}.png")


if __name__ == "__main__":
    main()
