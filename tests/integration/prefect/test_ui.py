"""Prefect's UI in a real browser: a finished run behind the password."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from tests.support.asking import RUN, asked
from tests.support.browsers import BROWSER
from tests.support.in_process import InProcessJob
from tests.support.jobs import PASSWORD

PATIENCE_MS = 240_000

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(900),
    pytest.mark.skipif(BROWSER is None, reason="needs a browser on the PATH: apt-get install chromium"),
]


@pytest.fixture
def finished_run(tmp_path, prefect_api) -> None:
    """Name of a run that no other job has.

    The run ends before the browser starts, which keeps this thread's event loop.
    """
    InProcessJob(tmp_path, prefect_api).train("name=seen", "iterations=2")


@contextmanager
def browsing(api: str) -> Iterator[Page]:
    """First page of the UI in a browser that has not logged in."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        opened = browser.new_page()
        opened.set_default_timeout(PATIENCE_MS)
        opened.goto(api.removesuffix("/api"))
        yield opened
        browser.close()


def log_in(page: Page, password: str) -> None:
    page.locator("input[type=password]").fill(password)
    page.get_by_role("button", name="Login").click()


def test_the_ui_shows_a_finished_run_after_the_password_is_entered(finished_run, prefect_api):
    expect.set_options(timeout=PATIENCE_MS)
    asked = set[str]()
    with browsing(prefect_api) as page:
        page.on("requestfinished", lambda request: asked.add(urlsplit(request.url).netloc))  # none of data: URLs
        log_in(page, "tests:wrong")
        expect(page.get_by_text("Invalid credentials").first).to_be_visible()
        log_in(page, ":".join(PASSWORD))
        expect(page).to_have_url(re.compile("/dashboard"))

        page.get_by_role("link", name="Runs", exact=True).click()
        page.get_by_role("link", name="seen", exact=True).click()
        expect(page).to_have_url(re.compile("/runs/flow-run/"))
        expect(page.get_by_text("Completed", exact=True).first).to_be_visible()
        page.get_by_role("tab", name="Subflow Runs").click()
        for part in ("rollout 0", "scoring 0", "update", "warm-up"):
            expect(page.get_by_role("link", name=part, exact=True).first).to_be_visible()

        page.get_by_role("tab", name="Artifacts").click()
        page.get_by_role("link", name=re.compile("TABLE seen-iterations")).first.click()
        page.get_by_role("link", name=re.compile("^[0-9a-f]{8}$")).first.click()  # the newest state of the table
        expect(page.get_by_role("columnheader", name="reward", exact=True)).to_be_visible()
        expect(page.get_by_role("row")).to_have_count(3)  # of two iterations, and its head
        assert {place for place in asked if place} == {urlsplit(page.url).netloc}, (
            "the UI tells nobody else that somebody reads"
        )


def test_a_proposal_is_approved_in_its_form_in_the_browser(tmp_path, prefect_api):
    asking = asked(tmp_path, prefect_api)
    expect.set_options(timeout=PATIENCE_MS)
    with browsing(prefect_api) as page:
        log_in(page, ":".join(PASSWORD))
        expect(page).to_have_url(re.compile("/dashboard"))
        page.goto(f"{prefect_api.removesuffix('/api')}/runs/flow-run/{asking.flow_run.id}")
        page.get_by_role("button", name="Resume").click()
        form = page.get_by_role("dialog")
        expect(form.get_by_text(f"Should the policy of {RUN} become the champion of")).to_be_visible()
        expect(form.get_by_text("sums: ")).to_be_visible()
        form.locator("button.p-select-button__control").focus()
        page.keyboard.press("ArrowDown")
        page.locator(".p-select-option").filter(has_text="yes").click()
        reason, name = form.locator("textarea").all()
        reason.fill("read fifty answers")
        name.fill("Ann")
        form.get_by_role("button", name="Submit").click()
        expect(form).to_be_hidden()
    assert asking.goes_on().state.name == "Completed"
    proposal, promoted = asking.registry.records()
    assert (proposal.kind, promoted.kind, promoted.policy) == ("proposal", "promote", proposal.policy)
    assert (promoted.reason, promoted.who) == ("read fifty answers", "Ann, by the form of tiny-20261102")
