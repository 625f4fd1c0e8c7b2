"""What Prefect's pages show of completions: their text, whatever Markdown or HTML it is made of."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from models.rollouts.preview import RolloutPreview
from tasks.reporting import RunSummary, escape_markdown, rollout_table, summary_page
from tasks.views.metrics import Accuracy

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


def preview(text: str) -> RolloutPreview:
    return RolloutPreview(
        iteration=1, prompt_id="p", sample=0, prompt=text, completion=text, answer=text, reward=1.0,
        finish_reason="stop", tokens=3,
    )  # fmt: skip


def tags(html: str) -> set[str]:
    return set(re.findall(r"<([a-z0-9]+)", html))


@pytest.mark.parametrize("renderer", RENDERERS)
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_completion_in_a_table_is_text_and_nothing_else(attack, renderer):
    [row] = rollout_table([preview(attack)])
    for name in ("prompt", "completion", "answer"):
        html = RENDERERS[renderer].render(str(row[name]))
        assert tags(html) <= {"p", "br"}, html


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_word_of_a_completion_is_a_link_by_itself(attack):
    # GitHub's dialect makes links of bare addresses; the escaped text has none for it to find.
    assert not re.search(r"://|www\.|\w@\w", escape_markdown(attack))


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab1 !#&()*+-.:<>@[]\\_`{|}~=\"'/$^%?,;"))
def test_an_escaped_line_reads_as_it_was_written(text):
    html = RENDERERS["github"].renderInline(escape_markdown(text))
    shown = html.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"').replace("&amp;", "&")
    assert shown.strip(" ") == text.strip(" ")


def test_a_missing_answer_stays_missing():
    assert rollout_table([preview("x").model_copy(update={"answer": None})])[0]["answer"] is None


@pytest.mark.parametrize("attack", [*ATTACKS, "`" * 9 + "\n![x](http://evil)", "~~~\n![x](http://evil)"])
def test_the_only_picture_of_a_summary_is_the_learning_curve(attack):
    accuracy = Accuracy(number=0, problems=2, mean=0.5, low=0.1, high=0.9)
    summary = RunSummary(
        run="r",
        path="/r",
        iterations=1,
        before=accuracy,
        after=accuracy,
        policy="/r/p",
        base=None,
        digest="d",
        plot="/r/x",
    )
    html = RENDERERS["github"].render(summary_page(summary, b"png", [preview(attack)]))
    assert html.count("<img") == html.count('<img src="data:image/png;base64,') == 1
    assert "<a" not in html
