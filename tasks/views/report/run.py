"""The report of a run: one page with all that the store knows of it that a person wants to see."""

from typing import Final

from infra.config import Settings
from infra.errors import Damaged
from infra.store.runs import Run
from models.config.rewards import ScoringConfig
from models.data.images import data_address, thumbnail
from tasks.views.metrics import sealed_iterations
from tasks.views.report import sections
from tasks.views.report.numbers import columns_of, plans_of
from tasks.views.report.page import Browsed, Section, browser, drawn_charts, figures, page
from tasks.views.report.samples import BrowsedGroup, browsed_groups
from tasks.views.report.slots import decisions_of, slots_of
from tasks.views.runs import RunDescription, described, media_of, open_known_run

IMAGES: Final = 200
"""Thumbnails of at most 4 kB each."""


class RunReport(Settings):
    """A report that was made."""

    run: str
    """Name."""
    path: str
    """Where it lies."""
    bytes: int
    """Its size."""


def report_page(store: str, name: str) -> str:
    """Make the page of a run."""
    run = open_known_run(store, name)
    description = described(run)
    seals, terms = sealed_iterations(run), ScoringConfig.model_validate(run.record.config["scoring"]).terms
    columns = columns_of(description.iterations, seals, description.evaluations)
    charts, decisions = drawn_charts(plans_of(columns, terms), columns), decisions_of(run)
    browsed = _browsed(run, description, terms)
    numbers = '<details id="all"><summary>all numbers of all iterations</summary><div class="scroll" id="numbers"></div></details>'
    parts = [
        sections.verdict(run, description, store),
        Section(name="curves", title="Curves", body=figures(charts) + numbers),
        Section(name="samples", title="Completions", body=browser() if browsed.groups else "<p>None are there.</p>"),
        Section(name="evaluations", title="Evaluations", body=sections.evaluations(description)),
        sections.slots(slots_of(run, [each.iteration for each in description.iterations], decisions), decisions),
        Section(name="cost", title="Cost", body=sections.costs(description)),
        sections.missing(run, description),
        sections.lineage(run, description),
        sections.configuration(run, description),
    ]
    subtitle = f"made {description.created}, fingerprint {description.fingerprint}"
    return page(f"Run {name}", subtitle, parts, columns=columns, charts=charts, browsed=browsed)


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
    """Small copies of the images that prompts show."""
    digests = list(dict.fromkeys(digest for group in groups for digest in group.images))[:IMAGES]
    media, found = media_of(run, "train", "heldout"), dict[str, str]()
    for digest in digests:
        try:
            found[digest] = data_address(thumbnail(media.encoded(digest)))
        except (Damaged, KeyError):  # its shard was deleted
            continue
    return found
