"""What is told of a run in words: its summary, and rollouts as tables and pages of Prefect show them."""

import base64
import io
import re
import string
import textwrap
from collections.abc import Mapping, Sequence
from typing import Final

from infra.config import Settings
from infra.costs import Cost
from models.rollouts.preview import PICTURED, Excerpts, RolloutPreview
from tasks.views.metrics import Accuracy, IterationReport, shown

TOLD_SECONDS: Final = 0.05
"""Stages that take less are not told of."""

FENCE_COLUMNS: Final = 80
"""Width of fenced lines. Prefect's UI does not wrap a fenced line, so the end of a longer line is out of view."""


class RunSummary(Settings):
    """A finished run."""

    run: str
    """Name."""
    path: str
    """Where it lies."""
    iterations: int
    """Sealed iterations."""
    before: Accuracy
    """Held-out accuracy of the initial policy."""
    after: Accuracy
    """Held-out accuracy of the last policy."""
    policy: str
    """Directory of the last policy, or of its adapter."""
    base: str | None
    """Directory of the weights to which the adapter is added; none where the policy's are its own."""
    digest: str
    """Proves which policy it is."""
    plot: str
    """PNG of the learning curve."""
    cost: Cost = Cost()
    """What its iterations and evaluations took."""
    stages: dict[str, float] = {}
    """Mean seconds of an iteration by stage, in their order; `between` is what no stage took."""
    report: str | None = None
    """HTML of the report; none where none was asked for, or it could not be made."""


_PUNCTUATION = re.compile(f"[{re.escape(string.punctuation)}]")  # all that Markdown is made of, and may be escaped

_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def escape_markdown(text: str) -> str:
    r"""Quote a text for Prefect's pages, which render Markdown and HTML in cells of tables too.

    A completion is shown as it was written: it opens no tag, picture or link, and the browser fetches nothing.

    >>> print(escape_markdown("![x](http://a) <b>"))
    \!\[x\]\(http\:\/\/a\) &lt;b&gt;
    """
    return _PUNCTUATION.sub(lambda mark: _ENTITIES.get(mark[0], f"\\{mark[0]}"), text)


def rollout_table(samples: Sequence[RolloutPreview]) -> list[dict[str, object]]:
    """Show completions with their rewards, their texts escaped; where prompts show images, how these are named."""
    sees = any(sample.images for sample in samples)
    return [
        {
            "reward": sample.reward,
            "prompt": escape_markdown(sample.prompt),
            "completion": escape_markdown(sample.completion),
            "answer": None if sample.answer is None else escape_markdown(sample.answer),
            "tokens": sample.tokens,
            "finish": sample.finish_reason,
            "prompt_id": sample.prompt_id,
            **({"images": ", ".join(image.digest[:16] for image in sample.images)} if sees else {}),
        }
        for sample in samples
    ]


def summary_page(
    run: str, text: str, places: Sequence[str], *, warnings: Sequence[str] = (), png: bytes, excerpts: Excerpts
) -> str:
    """Write the state of a run as a page of Markdown.

    Warnings are list items, whose whole text the browser shows. Completions are in fences that no completion can
    close, below small images.
    """
    image = base64.b64encode(png).decode()
    page = io.StringIO()
    lines = (textwrap.wrap(line, FENCE_COLUMNS, subsequent_indent=" " * 9) for line in text.splitlines())
    page.write("\n".join((f"# Run {run}\n\n```text", *("\n".join(line) for line in lines), "```\n\n")))
    page.writelines(f"- {escape_markdown(warning)}\n" for warning in warnings)
    page.writelines(f"- {place}\n" for place in places)
    page.write(f"\n![learning curve](data:image/png;base64,{image})\n\n")
    for sample in excerpts.samples[:PICTURED]:
        pictured = [each.digest for each in sample.images if each.digest in excerpts.thumbnails]
        page.writelines(f"![image {digest[:16]}]({excerpts.thumbnails[digest]})\n\n" for digest in pictured)
        told = f"{sample.prompt}{sample.completion}"
        fence = "`" * max(3, *(len(found) + 1 for found in re.findall("`+|$", told)))  # longer than any in the text
        page.write(f"{fence}text\n{told}\n{fence}\nreward {sample.reward}\n\n")
    return page.getvalue()


def places_of(summary: RunSummary) -> list[str]:
    """Where a finished run and its policy lie."""
    added = f", added to `{summary.base}`" if summary.base else ""
    return [f"policy `{summary.policy}`{added}", f"digest `{summary.digest}`", f"run `{summary.path}`"]


def summary_lines(summary: RunSummary) -> str:
    """Held-out accuracy before and after, with intervals; what that took."""
    lines = [*_accuracies(summary.before, summary.after), f"took     {summary.cost.line()}"]
    return "\n".join((*lines, *([f"         {seconds_line(summary.stages)}"] if summary.stages else [])))


def seconds_line(stages: Mapping[str, float]) -> str:
    """Say what an iteration takes, and of what that is the sum."""
    parts = [
        f"{name} {seconds:.1f}" for name, seconds in stages.items() if name != "between" and seconds >= TOLD_SECONDS
    ]
    return f"{sum(stages.values()):.1f} s an iteration: {', '.join(parts)}, between stages {stages['between']:.1f}"


def standing_text(reports: Sequence[IterationReport], evaluations: Sequence[Accuracy], *, total: int) -> str:
    """Return the progress of a run that continues or was ended: the iteration and the measured accuracies."""
    newest = reports[-1]
    lines = [f"iteration {newest.iteration} of {total}: sampled accuracy {shown(newest.accuracy)}"]
    lines += _accuracies(evaluations[0], evaluations[-1]) if evaluations else []
    return "\n".join(lines)


def _accuracies(before: Accuracy, after: Accuracy) -> list[str]:
    told = [f"held-out accuracy before {before.interval}{before.passed}, {before.asked}"]
    again = "" if after.asked == before.asked else f", {after.asked}"
    return told if after == before else [*told, f"                  after  {after.interval}{after.passed}{again}"]
