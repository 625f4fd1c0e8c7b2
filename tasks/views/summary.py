"""Summaries of a run as text for the terminal and as Markdown pages and tables for Prefect."""

import base64
import io
import re
import string
import textwrap
from collections.abc import Mapping, Sequence
from typing import Final

from rheostat.infra.config import Settings
from rheostat.infra.costs import Cost
from rheostat.models.rollouts.preview import PICTURED, Excerpts, RolloutPreview
from rheostat.tasks.views.metrics import Accuracy, IterationReport, format_number

MIN_SHOWN_SECONDS: Final = 0.05
"""Minimum duration in seconds for a stage to be listed."""

FENCE_COLUMNS: Final = 80
"""Maximum number of characters of a line in a Markdown code block. Prefect's UI does not wrap these lines, so the end
of a longer line would be hidden."""


class RunSummary(Settings):
    """Final summary of a run, which `rheostat train` prints."""

    run: str
    """Directory of the run, or its address in a bucket."""
    path: str
    """Location of the run."""
    iterations: int
    """Number of completed iterations."""
    before: Accuracy
    """Held-out accuracy of the initial policy."""
    after: Accuracy
    """Held-out accuracy of the last policy."""
    policy: str
    """Directory of the last policy, or of its adapter."""
    base: str | None
    """Directory of the base weights to which the adapter is added, or None if the policy has no adapter."""
    digest: str
    """Digest that identifies the last policy."""
    plot: str
    """Location of the PNG with the learning curves."""
    cost: Cost = Cost()
    """Total cost of the run's iterations and evaluations."""
    stages: dict[str, float] = {}
    """Mean seconds per iteration of each stage, in order. `between` is the time that belongs to no stage."""
    report: str | None = None
    """Location of the HTML report, or None if no report was requested or it could not be written."""


# every character with a meaning in Markdown; all of these may be escaped
_PUNCTUATION = re.compile(f"[{re.escape(string.punctuation)}]")

_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def escape_markdown(text: str) -> str:
    r"""Escape a text for Prefect's pages, which render Markdown and HTML even in table cells.

    A completion is shown exactly as it was generated. It cannot open a tag, image or link, so the browser fetches
    nothing.

    >>> print(escape_markdown("![x](http://a) <b>"))
    \!\[x\]\(http\:\/\/a\) &lt;b&gt;
    """
    return _PUNCTUATION.sub(lambda mark: _ENTITIES.get(mark[0], f"\\{mark[0]}"), text)


def rollout_table(samples: Sequence[RolloutPreview]) -> list[dict[str, object]]:
    """Return a table of completions for Prefect, one row per completion. Texts are escaped, and images of prompts
    appear as shortened digests."""
    shows_images = any(sample.images for sample in samples)
    return [
        {
            "reward": sample.reward,
            "prompt": escape_markdown(sample.prompt),
            "completion": escape_markdown(sample.completion),
            "answer": None if sample.answer is None else escape_markdown(sample.answer),
            "tokens": sample.tokens,
            "finish": sample.finish_reason,
            "prompt_id": sample.prompt_id,
            **({"images": ", ".join(image.digest[:16] for image in sample.images)} if shows_images else {}),
        }
        for sample in samples
    ]


def summary_page(
    run: str, text: str, places: Sequence[str], *, warnings: Sequence[str] = (), png: bytes, excerpts: Excerpts
) -> str:
    """Return a Markdown page with the summary, warnings, learning curves and some completions of a run.

    Warnings are list items, whose whole text the browser shows. Completions are enclosed in code fences that their text
    cannot close, below thumbnails of their images.
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
        text_of_sample = f"{sample.prompt}{sample.completion}"
        fence = "`" * max(
            3, *(len(fence_match) + 1 for fence_match in re.findall("`+|$", text_of_sample))
        )  # longer than any in the text
        page.write(f"{fence}text\n{text_of_sample}\n{fence}\nreward {sample.reward}\n\n")
    return page.getvalue()


def places_of(summary: RunSummary) -> list[str]:
    """Return the locations of a finished run and its policy as lines of Markdown."""
    added = f", added to `{summary.base}`" if summary.base else ""
    return [f"policy `{summary.policy}`{added}", f"digest `{summary.digest}`", f"run `{summary.path}`"]


def summary_lines(summary: RunSummary) -> str:
    """Describe the held-out accuracy before and after training, the cost and the time per iteration, as
    lines of text."""
    lines = [*_accuracy_lines(summary.before, summary.after), f"took     {summary.cost.line()}"]
    return "\n".join((*lines, *([f"         {seconds_line(summary.stages)}"] if summary.stages else [])))


def seconds_line(stages: Mapping[str, float]) -> str:
    """Describe the mean duration of an iteration, with the seconds of each stage that add up to it."""
    parts = [
        f"{name} {seconds:.1f}"
        for name, seconds in stages.items()
        if name != "between" and seconds >= MIN_SHOWN_SECONDS
    ]
    return f"{sum(stages.values()):.1f} s per iteration: {', '.join(parts)}, between stages {stages['between']:.1f}"


def progress_text(reports: Sequence[IterationReport], evaluations: Sequence[Accuracy], *, total: int) -> str:
    """Describe the progress of an active or interrupted run: last iteration and held-out accuracy, as lines of text."""
    newest = reports[-1]
    lines = [f"iteration {newest.iteration} of {total}: sampled accuracy {format_number(newest.accuracy)}"]
    lines += _accuracy_lines(evaluations[0], evaluations[-1]) if evaluations else []
    return "\n".join(lines)


def _accuracy_lines(before: Accuracy, after: Accuracy) -> list[str]:
    lines = [f"held-out accuracy before {before.interval}{before.pass_at_text}, {before.evaluation_text}"]
    difference = "" if after.evaluation_text == before.evaluation_text else f", {after.evaluation_text}"
    return (
        lines
        if after == before
        else [*lines, f"                  after  {after.interval}{after.pass_at_text}{difference}"]
    )
