"""Pages and tables of runs: completions appear as text, even if they contain Markdown or HTML."""

import re
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from PIL import Image

from rheostat.infra.costs import Cost
from rheostat.infra.terminal import WIDTH
from rheostat.models.data.images import THUMBNAIL_BYTES, data_address, digest_of, thumbnail
from rheostat.models.records.media import InMemoryImages, ShownImage
from rheostat.models.rollouts.preview import Excerpts, RolloutPreview
from rheostat.tasks.views.metrics import Accuracy, EpisodesReport, IterationReport, iteration_table
from rheostat.tasks.views.pages import rollouts_page
from rheostat.tasks.views.summary import (
    RunSummary,
    escape_markdown,
    places_of,
    progress_text,
    rollout_table,
    seconds_line,
    summary_lines,
    summary_page,
)
from tests.support.pictures import picture

ATTACKS = [
    "![x](http://evil/y.png) <img src=x> [a](javascript:1)",
    "<http://evil> http://evil/y www.evil.example me@evil.example",
    "![x][1]\n\n[1]: http://evil/y.png",
    "<script>alert(1)</script>\n\n<div onclick=alert(1)>",
    "\\![x](http://evil/y.png) \\\\[a](http://evil)",
    "&lt;img src=x&gt; &#33;[x](http://evil)",
    "| a | b |\n|---|---|\n| ![x](http://evil) | <img src=x> |",
    "```\n</code><img src=x>\n```\n![x](http://evil)",
    "# big\n\n- item\n1. one\n> quote\n\n***\n\n**bold** _thin_ ~~gone~~ `code`",
    "text\r![x](http://evil)\r\n<img src=x>",
]
RENDERERS = {
    "plain": MarkdownIt("commonmark", {"html": True}),
    "github": MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]),
}


ACCURACY = Accuracy(number=0, problems=2, mean=0.5, low=0.1, high=0.9)
SUMMARY = RunSummary(
    run="r", path="/r", iterations=1, before=ACCURACY, after=ACCURACY, policy="/r/p", base=None, digest="d", plot="/r/x"
)


def preview(text: str) -> RolloutPreview:
    return RolloutPreview(
        iteration=1, prompt_id="p", sample=0, prompt=text, completion=text, answer=text, reward=1.0,
        finish_reason="stop", tokens=3,
    )  # fmt: skip


def page_of(summary: RunSummary, excerpts: Excerpts) -> str:
    return summary_page(summary.run, summary_lines(summary), places_of(summary), png=b"png", excerpts=excerpts)


def tags(html: str) -> set[str]:
    return set(re.findall(r"<([a-z0-9]+)", html))


@pytest.mark.parametrize("renderer", RENDERERS)
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_completion_in_a_table_is_rendered_as_text(attack, renderer):
    [row] = rollout_table([preview(attack)])
    for name in ("prompt", "completion", "answer"):
        html = RENDERERS[renderer].render(str(row[name]))
        assert tags(html) <= {"p", "br"}, html
    # GitHub turns bare addresses into links; the escaped text has none that it could find.
    assert not re.search(r"://|www\.|\w@\w", escape_markdown(attack))


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab1 !#&()*+-.:<>@[]\\_`{|}~=\"'/$^%?,;"))
def test_an_escaped_line_is_rendered_as_it_was_written(text):
    html = RENDERERS["github"].renderInline(escape_markdown(text))
    shown = html.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"').replace("&amp;", "&")
    assert shown.strip(" ") == text.strip(" ")


@pytest.mark.parametrize("attack", [*ATTACKS, "`" * 9 + "\n![x](http://evil)", "~~~\n![x](http://evil)"])
def test_the_only_picture_of_a_summary_is_the_learning_curve(attack):
    html = RENDERERS["github"].render(page_of(SUMMARY, Excerpts((preview(attack),))))
    assert html.count("<img") == html.count('<img src="data:image/png;base64,') == 1
    assert "<a" not in html


def test_a_summary_reports_accuracy_before_and_after_and_pass_at_k():
    later = ACCURACY.model_copy(update={"number": 1, "mean": 0.75})
    lines = summary_lines(SUMMARY.model_copy(update={"after": later})).splitlines()
    assert lines[:2] == [
        "held-out accuracy before 0.500 (95% interval 0.100 to 0.900), 2 problems",
        "                  after  0.750 (95% interval 0.100 to 0.900)",
    ]
    sampled = ACCURACY.model_copy(update={"samples": 4, "temperature": 1.0, "pass_at": {1: 0.5, 4: 0.75}})
    page = " ".join(page_of(SUMMARY.model_copy(update={"before": sampled, "after": sampled}), Excerpts(())).split())
    assert "to 0.900), pass@1 0.500, pass@4 0.750, 2 problems with 4 completions each, sampled " in page


def test_the_seconds_of_the_stages_are_reported_in_one_line():
    stages = {"rollout": 3.0, "scoring": 0.5, "estimates": 0.0, "credit": 0.01, "update": 2.0, "between": 1.49}
    assert seconds_line(stages) == "7.0 s per iteration: rollout 3.0, scoring 0.5, update 2.0, between stages 1.5"


REPORT = IterationReport(
    iteration=3, accuracy=0.25, reward=None, length=7.08, kl=0.00213, mismatch=2.34e-7, mismatch_max=1e-6,
    importance_weight=1.0, importance_cut=0.0, missing=2, quarantined=False, policy="0123456789abcdef0123",
    seconds={"rollout": 1.234, "total": 2.5, "between": 1.266}, reward_std=0.4, informative=0.125, truncated=0.78,
    entropy=0.5, grad_norm=1.5, clip_low=0.01, weights_bytes=0, weights_seconds=0.0,
)  # fmt: skip


def test_the_table_of_iterations_has_the_costs_of_all_roles_and_each_of_several_rewards():
    costs = {"rollout": Cost(prompt_tokens=20, written_tokens=1500), "update": Cost(learnt_tokens=1480, price=0.5)}
    terms = {"right": 0.25, "brief": -0.5}
    [row] = iteration_table([REPORT.model_copy(update={"costs": costs, "terms": terms})])
    assert [row[name] for name in ("prompt tokens", "generated", "trained", "price")] == [
        "20",
        "1,500",
        "1,480",
        "0.5000",
    ]
    assert (row["reward right"], row["reward brief"]) == ("0.250", "-0.500")


def test_the_page_of_a_run_shows_long_warnings_in_full_within_the_width_of_prefects_page():
    text = progress_text([REPORT.model_copy(update={"iteration": 4})], [ACCURACY], total=9)
    assert text.splitlines() == [
        "iteration 4 of 9: sampled accuracy 0.250",
        "held-out accuracy before 0.500 (95% interval 0.100 to 0.900), 2 problems",
    ]
    warning = f"warning: iteration 4: {'many completions were cut off, ' * 9}raise rollout.sampling.max_new_tokens"
    text, nothing = f"{text}\n{'a fact ' * 30}", Excerpts(())
    html = RENDERERS["plain"].render(summary_page("r", text, [], warnings=[warning], png=b"", excerpts=nothing))
    [fence] = re.findall("<code.*?>(.*)</code>", html, re.DOTALL)
    assert max(map(len, fence.splitlines())) <= 80 and " ".join(fence.split()) == " ".join(text.split())
    assert f"<li>{warning}</li>" in html


def test_the_line_of_an_iteration_fits_a_terminal_and_repeats_no_number():
    long = REPORT.model_copy(update={"iteration": 123, "reward": 0.5, "length": 1234.6, "seconds": {"total": 987.5}})
    line = f"{long.line(2000)}  eta 3:25:45"
    assert len(line) <= WIDTH and "reward 0.500" in line
    assert "reward" not in long.model_copy(update={"reward": 0.25}).line(2000), "which is the accuracy"


def test_the_table_of_iterations_has_columns_of_episodes_if_there_are_episodes():
    endings = {"stop": 0.75, "turns": 0.25, "length": 0.0, "failed": 0.0}
    episodes = EpisodesReport(
        turns=1.5, calls=0.25, call_errors=0.125, endings=endings, answer_seconds=4.25, environment_seconds=1.0
    )
    [plain, told] = iteration_table([REPORT, REPORT.model_copy(update={"episodes": episodes})])
    assert plain == {
        "iteration": 3, "sampled accuracy": "0.250", "reward": "-", "length": "7.1", "truncated": "78.0%",
        "entropy": "0.500", "kl": 0.0021, "gradient norm": "1.500", "informative": "12.5%", "reward spread": "0.400",
        "clipped low": "1.0%", "clipped high": "-", "mismatch": "2.3e-07", "missing": 2, "total seconds": 2.5,
        "rollout seconds": 1.23, "scoring seconds": 0.0, "estimates seconds": 0.0, "credit seconds": 0.0,
        "update seconds": 0.0, "between seconds": 1.27, "quarantined": False, "policy": "0123456789abcdef",
        "warnings": "",
    }  # fmt: skip
    of_episodes = {
        "turns": "1.50",
        "calls": "0.25",
        "unparsed calls": "0.125",
        "environment s": "4.25",
        "idle s": "1.00",
    }
    assert told == plain | of_episodes | {"ended by": "stop 75%, turns 25%"}


# ---- images


def shows(text: str, *images: bytes) -> RolloutPreview:
    named = [ShownImage(digest=digest_of(each), format="PNG", width=24, height=24, bytes=len(each)) for each in images]
    return preview(text).model_copy(update={"images": tuple(named)})


def shown_as(kind: str, sample: RolloutPreview) -> RolloutPreview:
    return sample.model_copy(update={"images": tuple(e.model_copy(update={"format": kind}) for e in sample.images)})


def noise(side: int) -> bytes:
    sink = BytesIO()
    pixels = np.random.default_rng(side).integers(0, 256, (side, side, 3), dtype=np.uint8)
    profile = b"0" * 6000
    Image.fromarray(pixels).save(sink, "PNG", icc_profile=profile)
    return sink.getvalue()


@pytest.mark.parametrize("side", [1, 24, 64, 300, 1500])
def test_a_thumbnail_is_a_picture_of_4_kilobytes_at_most(side):
    small = thumbnail(noise(side))
    assert len(small) <= THUMBNAIL_BYTES
    with Image.open(BytesIO(small)) as image:
        image.load()
        assert image.format in ("PNG", "JPEG") and 32 <= max(image.size) <= 96


def test_a_tiny_picture_is_enlarged_pixel_by_pixel():
    with Image.open(BytesIO(thumbnail(picture("red")))) as image:
        assert (image.size, image.getcolors()) == ((96, 96), [(96 * 96, (255, 0, 0))])


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_summary_shows_prompt_images_and_the_learning_curve_but_no_links_of_completions(attack):
    red, blue = picture("red"), picture("blue")
    addresses = {digest_of(red): data_address(thumbnail(red))}
    page = page_of(SUMMARY, Excerpts((shows(attack, red, blue), shows(attack)), addresses))
    html = RENDERERS["github"].render(page)
    assert html.count("<img") == 2, "the learning curve and the image that has a small copy"
    assert html.count('<img src="data:image/png;base64,') == 2
    assert f'alt="image {digest_of(red)[:16]}"' in html


def test_the_table_of_rollouts_has_the_digests_of_images_and_a_missing_answer_stays_missing():
    red = picture("red")
    rows = rollout_table([shows("x", red), shows("y")])
    assert [row["images"] for row in rows] == [digest_of(red)[:16], ""]
    [row] = rollout_table([shows("y").model_copy(update={"answer": None})])
    assert "images" not in row and row["answer"] is None


@pytest.mark.parametrize("attack", [*ATTACKS, "</pre><img src=x>", '"><script>x</script>'])
def test_the_page_of_rollouts_shows_images_and_completions_as_text(attack):
    red, tiff = picture("red"), picture("blue", kind="TIFF")
    held = InMemoryImages({digest_of(each): each for each in (red, tiff)})
    html = rollouts_page("tiny", [shows(attack, red), shown_as("TIFF", shows(attack, tiff))], held)
    assert tags(html) == {"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "img", "pre", "b"}
    sources = re.findall(r'<img src="([^"]*)"', html)
    assert sources == [data_address(red), data_address(thumbnail(tiff))], "no browser shows TIFF"
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in html
