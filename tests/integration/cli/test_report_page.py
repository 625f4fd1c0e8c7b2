"""The report of a run in a real browser, opened from disk, with a policy that generates hostile texts."""

import pytest
from playwright.sync_api import expect

from rheostat.flows.cli.app import main
from tests.support.browsers import BROWSER, open_page
from tests.support.long_runs import write_long_run

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(BROWSER is None, reason="needs a browser on the PATH: apt-get install chromium"),
]

HOSTILE = ("<script>alert(1)</script>", "</svg></script><img src=x onerror=alert(2)>")
TEXTS = (*HOSTILE, "a needle\n1", "plain")


def write_page(place, *, iterations, texts):
    """Write the report of a run and return its path."""
    write_long_run(place / "runs", iterations=iterations, texts=texts)
    assert main(["report", "long", "--store", str(place / "runs"), "--to", str(place / "long.html")]) == 0
    return place / "long.html"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Path of the report of a run of five iterations."""
    return write_page(tmp_path_factory.mktemp("report"), iterations=5, texts=TEXTS)


def rewards(page):
    return [float(text.removeprefix("reward ")) for text in page.locator(".told b").all_inner_texts()]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_makes_no_requests_and_shows_hostile_texts_as_text(path, scheme):
    with open_page(path, scheme=scheme) as seen:
        expect(seen.page.get_by_role("heading", name="Run long")).to_be_visible()
        for text in HOSTILE:
            seen.page.locator("#query").fill(text)
            expect(seen.page.locator("#group pre", has_text=text).first).to_be_visible()
        assert seen.page.locator("main script, main img").count() == 0
        assert seen.complaints == []
        assert seen.requests == [path.as_uri()]


def test_every_control_of_the_completion_browser_works(path):
    with open_page(path) as seen:
        page = seen.page
        assert (
            page.locator("#batch").input_value() == "eval-0005" and page.locator("#beside").input_value() == "eval-0000"
        )
        expect(page.locator("#group h3")).to_have_count(2)
        page.select_option("#batch", "it-0001")
        page.select_option("#beside", "it-0005")
        expect(page.locator("#group h3").nth(1)).to_contain_text("it-0005: mean reward")
        page.locator("#groups button").nth(3).click()
        expect(page.locator("#groups button").nth(3)).to_have_attribute("aria-current", "true")
        page.select_option("#beside", "")
        expect(page.locator("#group h3")).to_have_count(1)

        page.select_option("#order", "best")
        assert rewards(page) == sorted(rewards(page), reverse=True) and {0.0, 1.0} == set(rewards(page))
        page.select_option("#order", "worst")
        assert rewards(page) == sorted(rewards(page))
        page.select_option("#order", "length")
        lengths = [len(text) for text in page.locator(".completion pre").all_inner_texts()]
        assert lengths == sorted(lengths, reverse=True)

        page.locator("#least").fill("0.75")
        aside = page.locator(".completion.aside .told b").all_inner_texts()
        assert set(aside) == {"reward 0"}
        page.select_option("#term", "short")
        expect(page.locator("#found")).to_have_text("0 of 36 prompts of it-0001")
        page.locator("#most").fill("0.5")
        page.locator("#least").fill("0.5")
        expect(page.locator("#found")).to_have_text("36 of 36 prompts of it-0001")

        page.locator("#query").fill("problem 35?")
        expect(page.locator("#found")).to_have_text("1 of 36 prompts of it-0001")
        page.select_option("#tint", "advantage")
        assert page.locator(".completion .plus").count() and page.locator(".completion .minus").count()
        assert page.locator(".completion .plus").first.get_attribute("title") == "advantage 0.5"
        page.select_option("#tint", "logprob")
        assert "log" in (page.locator(".completion .minus").first.get_attribute("title") or "")
        assert seen.complaints == []


def test_the_pointer_and_the_arrow_keys_show_the_numbers_of_a_curve(path):
    with open_page(path) as seen:
        page = seen.page
        usual = page.locator("#told-0").inner_text()
        assert "held-out accuracy 0 → 0.2" in usual
        box = page.locator("#chart-0").bounding_box()
        page.mouse.move(box["x"] + box["width"] - 2, box["y"] + box["height"] / 2)
        expect(page.locator("#told-0")).to_contain_text("iteration 5: held-out accuracy 0.2 (")
        page.mouse.move(0, 0)
        expect(page.locator("#told-0")).to_have_text(usual)
        page.locator("#chart-0").focus()
        page.keyboard.press("ArrowLeft")
        expect(page.locator("#told-0")).to_contain_text(
            "iteration 4: held-out accuracy 0.1667 (0.09487 to 0.2762), of rollouts 0.1667"
        )

        page.locator("#all summary").click()
        expect(page.locator("#numbers tbody tr")).to_have_count(6)
        assert (
            page.locator("#slots svg title").first.text_content()
            == "it-0001/rollout/0000: 2.00 s on slot 0, from 0.00 s"
        )
        assert seen.complaints == []


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Reports of a run and of a comparison, whose names and store contain no position for a line break."""
    place = tmp_path_factory.mktemp("phone") / ("store" * 12)
    names = ["long" * 12, "longer" * 9]
    for name, group in zip(names, (8, 4), strict=True):
        write_long_run(place, name=name, iterations=5, group=group, texts=(*TEXTS, "unbroken" * 40))
    assert main(["report", names[0], "--store", str(place), "--to", str(place / "report.html")]) == 0
    assert main(["compare", *names, "--store", str(place), "--to", str(place / "compare.html")]) == 0
    return {kind: place / f"{kind}.html" for kind in ("report", "compare")}


@pytest.mark.parametrize("kind", ["report", "compare"])
def test_a_page_never_scrolls_sideways_and_its_tables_fill_its_width(pages, kind):
    with open_page(pages[kind]) as seen:
        page = seen.page
        for summary in page.locator("summary").all():
            summary.click()
        for width in (360, 390, 768, 1280):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.scrollingElement.scrollWidth") <= width
            tables = page.locator("table").evaluate_all(
                "all => all.map(table => [table.offsetWidth, table.closest('.scroll').clientWidth])"
            )
            assert tables and all(table >= box for table, box in tables)
        assert seen.complaints == []


@pytest.mark.slow
def test_the_page_of_a_thousand_iterations_of_512_completions_is_smaller_than_4_megabytes(tmp_path):
    texts = [f"{number} + {number} = {2 * number}; " * (number % 40) for number in range(200)]
    path = write_page(tmp_path, iterations=1000, texts=[*texts, *HOSTILE])
    assert path.stat().st_size < 4e6
    with open_page(path) as seen:
        expect(seen.page.locator("#found")).to_contain_text("prompts of eval-1000")
        assert seen.complaints == []
