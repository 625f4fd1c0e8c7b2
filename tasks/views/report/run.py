"""Report of a run: one HTML page with everything in the store that a reader of the run needs.

Run as a program, this module reads `{"store": …, "name": …}` from stdin and writes the page into the run. The driver of
a run uses this, because it does not load payloads itself. The program prints `{"key": …}` and exits with code 0, or
prints `{"error": …}` in one line and exits with code 1.
"""

import contextlib
import json
import os
import sys
from itertools import zip_longest
from typing import Final

from rheostat.infra.config import Settings, read_recorded
from rheostat.infra.errors import Damaged, RheostatError
from rheostat.infra.store.runs import Run
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.data.images import data_address, thumbnail
from rheostat.tasks.run.batch import rollouts_of_batch
from rheostat.tasks.views.metrics import sealed_iterations
from rheostat.tasks.views.report import sections
from rheostat.tasks.views.report.numbers import columns_of, plans_of
from rheostat.tasks.views.report.page import Browsed, PageSection, browser, drawn_charts, figures, page
from rheostat.tasks.views.report.samples import BrowsedGroup, browsed_groups
from rheostat.tasks.views.report.slots import decisions_of, slots_of
from rheostat.tasks.views.runs import RunDescription, describe_open_run, detect_deletion, media_of, open_known_run

NUMBERS: Final = (
    '<details id="all"><summary>all numbers of all iterations</summary>'
    '<div class="scroll" id="numbers"></div></details>'
)
"""HTML element in which the page's script shows all numbers as a table."""
IMAGE_BYTES: Final = 1_100_000
"""Maximum number of bytes for all thumbnails on a page, enough for 200 of the largest size."""


class RunName(Settings):
    """Request to write the report of a run, which this program reads from stdin."""

    store: str
    """Directory or address of the store that contains the run."""
    name: str
    """Name of the run."""


def report_page(store: str, name: str) -> str:
    """Return the HTML report of a run. Raises BadInput if the store has no such run."""
    run = open_known_run(store, name)
    with detect_deletion(run):
        return _report_page(run, store)


def _report_page(run: Run, store: str) -> str:
    description = describe_open_run(run)
    seals, terms = sealed_iterations(run), read_recorded(ScoringConfig, run.record.config["scoring"]).terms
    columns = columns_of(description.iterations, seals, description.evaluations)
    charts, decisions = drawn_charts(plans_of(columns, terms), columns), decisions_of(run)
    browsed = _read_completions(run, description, terms)
    parts = [
        sections.verdict(run, description, store),
        PageSection(name="curves", title="Curves", body=figures(charts) + NUMBERS),
        PageSection(
            name="samples",
            title="Completions",
            body=browser() if browsed.groups else "<p>No completions are stored.</p>",
        ),
        PageSection(name="evaluations", title="Evaluations", body=sections.evaluations(description)),
        sections.slots(slots_of(run, [each.iteration for each in description.iterations], decisions), decisions),
        PageSection(name="cost", title="Cost", body=sections.costs(description)),
        sections.missing(run, description),
        sections.lineage(run, description),
        sections.configuration(run, description),
    ]
    subtitle = f"created {description.created}, fingerprint {description.fingerprint}"
    if description.forked_from:
        subtitle += f", forked from {description.forked_from}"
    return page(f"Run {run.name}", subtitle, parts, columns=columns, charts=charts, browsed=browsed)


def _read_completions(run: Run, description: RunDescription, terms: tuple[str, ...]) -> Browsed:
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
    """Return small copies of images in prompts and completions as `data:` addresses, by digest. The total size is
    limited.

    Batches take turns, starting with the first group of each, until `IMAGE_BYTES` is reached.
    """
    batches: dict[str, list[BrowsedGroup]] = {}
    for group in groups:
        batches.setdefault(group.batch, []).append(group)
    manifests = [manifest for batch in batches for manifest in rollouts_of_batch(run, batch)]
    media, thumbnails, num_bytes = media_of(run, "train", "heldout", rollouts=manifests), dict[str, str](), 0
    turns = (group for turn in zip_longest(*batches.values()) for group in turn if group is not None)
    for digest in dict.fromkeys(digest for group in turns for digest in _digests(group)):
        try:
            thumbnails[digest] = data_address(thumbnail(media.encoded(digest)))
        except (Damaged, KeyError):  # the shard with this image was deleted
            continue
        num_bytes += len(thumbnails[digest])
        if num_bytes > IMAGE_BYTES:
            break
    return thumbnails


def _digests(group: BrowsedGroup) -> list[str]:
    return [*group.images, *(digest for completion in group.completions for digest in completion.images)]


def report_key(number: int) -> str:
    """Return the key under which a run with this number of completed iterations stores its report."""
    return f"report/report-{number:04d}.html"


def put_report(store: str, name: str) -> str:
    """Write the report of a run into the run's store, unless it exists already, and return its key. The run may be
    locked by another process."""
    run = open_known_run(store, name)
    key = report_key(len(sealed_iterations(run)))
    if not run.store.exists(key):
        run.store.put(key, report_page(store, name).encode())
    return key


def main() -> int:
    """Run the program: read one request from stdin, write one line with the answer to stdout, and return
    the exit code."""
    answer = os.fdopen(os.dup(1), "w")
    with contextlib.redirect_stdout(sys.stderr):  # libraries may print, but stdout must contain only the answer
        try:
            request = RunName.model_validate_json(sys.stdin.read())
            response = {"key": put_report(request.store, request.name)}
        except RheostatError as error:
            response = {"error": " ".join(str(error).split())}
    with answer:
        answer.write(json.dumps(response) + "\n")
    return 1 if "error" in response else 0


if __name__ == "__main__":
    sys.exit(main())
