"""The report of a run: one page with all that the store knows of it that a person wants to see.

As a program it reads `{"store": …, "name": …}` on stdin and puts the page into the run, for a run's driver, which holds
no payload. It prints `{"key": …}`, or the error in one line with exit code 1.
"""

import contextlib
import json
import os
import sys
from itertools import zip_longest
from typing import Final

from infra.config import Settings, read_recorded
from infra.errors import Damaged, RheostatError
from infra.store.runs import Run
from models.config.rewards import ScoringConfig
from models.data.images import data_address, thumbnail
from tasks.run.batch import rollouts_under
from tasks.views.metrics import sealed_iterations
from tasks.views.report import sections
from tasks.views.report.numbers import columns_of, plans_of
from tasks.views.report.page import Browsed, PageSection, browser, drawn_charts, figures, page
from tasks.views.report.samples import BrowsedGroup, browsed_groups
from tasks.views.report.slots import decisions_of, slots_of
from tasks.views.runs import RunDescription, described, detect_deletion, media_of, open_known_run

NUMBERS: Final = (
    '<details id="all"><summary>all numbers of all iterations</summary>'
    '<div class="scroll" id="numbers"></div></details>'
)
"""Where the script shows them."""
IMAGE_BYTES: Final = 1_100_000
"""Of all thumbnails on a page: 200 of the largest."""


class RunName(Settings):
    """Names a run."""

    store: str
    """Where runs lie."""
    name: str
    """Its name."""


def report_page(store: str, name: str) -> str:
    """Make the page of a run."""
    run = open_known_run(store, name)
    with detect_deletion(run):
        return _report_page(run, store)


def _report_page(run: Run, store: str) -> str:
    description = described(run)
    seals, terms = sealed_iterations(run), read_recorded(ScoringConfig, run.record.config["scoring"]).terms
    columns = columns_of(description.iterations, seals, description.evaluations)
    charts, decisions = drawn_charts(plans_of(columns, terms), columns), decisions_of(run)
    browsed = _browsed(run, description, terms)
    parts = [
        sections.verdict(run, description, store),
        PageSection(name="curves", title="Curves", body=figures(charts) + NUMBERS),
        PageSection(
            name="samples", title="Completions", body=browser() if browsed.groups else "<p>None are there.</p>"
        ),
        PageSection(name="evaluations", title="Evaluations", body=sections.evaluations(description)),
        sections.slots(slots_of(run, [each.iteration for each in description.iterations], decisions), decisions),
        PageSection(name="cost", title="Cost", body=sections.costs(description)),
        sections.missing(run, description),
        sections.lineage(run, description),
        sections.configuration(run, description),
    ]
    subtitle = f"made {description.created}, fingerprint {description.fingerprint}"
    return page(f"Run {run.name}", subtitle, parts, columns=columns, charts=charts, browsed=browsed)


def _browsed(run: Run, description: RunDescription, terms: tuple[str, ...]) -> Browsed:
    evaluated = [each.number for each in description.evaluations]
    groups = browsed_groups(run, iterations=[each.iteration for each in description.iterations], evaluations=evaluated)
    batches = list(dict.fromkeys(group.batch for group in groups))
    tested = [batch for batch in batches if batch.startswith("eval-")]
    return Browsed(
        groups=groups,
        images=_thumbnails(run, groups),
        terms=terms,
        batch=(tested or batches or [""])[-1],
        beside=tested[0] if len(tested) > 1 else "",
    )


def _thumbnails(run: Run, groups: list[BrowsedGroup]) -> dict[str, str]:
    """Small copies of the images that prompts show and completions are, of each batch's first group first."""
    batches: dict[str, list[BrowsedGroup]] = {}
    for group in groups:
        batches.setdefault(group.batch, []).append(group)
    made = [manifest for batch in batches for manifest in rollouts_under(run, batch)]
    media, found, held = media_of(run, "train", "heldout", rollouts=made), dict[str, str](), 0
    turns = (group for turn in zip_longest(*batches.values()) for group in turn if group is not None)
    for digest in dict.fromkeys(digest for group in turns for digest in _digests(group)):
        try:
            found[digest] = data_address(thumbnail(media.encoded(digest)))
        except (Damaged, KeyError):  # its shard was deleted
            continue
        held += len(found[digest])
        if held > IMAGE_BYTES:
            break
    return found


def _digests(group: BrowsedGroup) -> list[str]:
    return [*group.images, *(digest for completion in group.completions for digest in completion.images)]


def report_key(number: int) -> str:
    """Name the object of a run's page after so many iterations."""
    return f"report/report-{number:04d}.html"


def put_report(store: str, name: str) -> str:
    """Make a run's page and put it into the run, which others may hold, unless it is there; return its key."""
    run = open_known_run(store, name)
    key = report_key(len(sealed_iterations(run)))
    if not run.store.exists(key):
        run.store.put(key, report_page(store, name).encode())
    return key


def main() -> int:
    """Answer one request on stdin with one line on stdout."""
    answer = os.fdopen(os.dup(1), "w")
    with contextlib.redirect_stdout(sys.stderr):  # libraries may print; the answer stands alone
        try:
            asked = RunName.model_validate_json(sys.stdin.read())
            told = {"key": put_report(asked.store, asked.name)}
        except RheostatError as error:
            told = {"error": " ".join(str(error).split())}
    with answer:
        answer.write(json.dumps(told) + "\n")
    return 1 if "error" in told else 0


if __name__ == "__main__":
    sys.exit(main())
