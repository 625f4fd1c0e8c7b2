"""A real browser for pages, which records requests and errors of a page."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@dataclass
class OpenedPage:
    """Page in the browser, with its errors and requests."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    """Errors and lines of the console, and dialogs."""
    requests: list[str] = field(default_factory=list)
    """Addresses that the page requested, except data URLs."""


@contextmanager
def open_page(path: Path, *, scheme: str = "light", width: int = 1300, height: int = 900) -> Iterator[OpenedPage]:
    """Open a file from disk."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        seen = OpenedPage(page)
        page.on("console", lambda line: seen.complaints.append(line.text))
        page.on("pageerror", lambda error: seen.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (seen.complaints.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda asked: seen.requests.append(asked.url) if asked.url[:5] != "data:" else None)
        page.goto(path.as_uri())
        yield seen
        browser.close()
