"""Runs beside each other: what their configurations differ in, their curves over each other, a paired test."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from html import escape
from itertools import combinations
from typing import Final

from pydantic import JsonValue

from infra.config import Settings, read_recorded
from infra.errors import BadInput, Quarantined
from infra.store.runs import Run
from models.config.rewards import ScoringConfig
from models.gate.comparison import PairedDifference
from tasks.views.metrics import Accuracy, sealed_iterations
from tasks.views.report.curves import COLORS
from tasks.views.report.numbers import HELDOUT, HIGH, LOW, ChartLine, ChartPlan, Columns, columns_of
from tasks.views.report.page import Browsed, PageSection, browser, drawn_charts, figures, page, paragraph, rows_table
from tasks.views.report.samples import BrowsedGroup, browsed_groups
from tasks.views.report.sections import difference_line, paired_difference
from tasks.views.runs import RunDescription, described, detect_deletion, open_known_run

MOST: Final = len(COLORS)
"""Runs that are told apart in a chart."""
COMPARED: Final = {
    "Held-out accuracy": HELDOUT,
    "Accuracy of rollouts": "accuracy",
    "Mean reward": "reward",
    "Length in tokens": "length",
    "Cut off": "credit/truncated_fraction",
    "Entropy, nats per token": "update/entropy",
    "KL of the update, nats per token": "kl",
    "Mismatch of engine and trainer, nats": "mismatch",
    "Seconds of an iteration": "seconds.total",
}
"""Columns that are drawn over each other."""


ABSENT: Final = "absent"


class ComparedRun(Settings):
    """One of the runs."""

    run: str
    """Name."""
    iterations: int
    """Sealed iterations."""
    before: Accuracy | None
    """Its first evaluation; none before it was measured."""
    after: Accuracy | None
    """Its last one."""
    price: float
    """What it took, by its prices."""
    worker_seconds: float
    """Seconds that its workers were held."""


class PairedRuns(Settings):
    """The last evaluations of two runs, problem by problem."""

    champion: str
    """The run that stands first."""
    challenger: str
    """The other one, whose gain it is."""
    difference: PairedDifference | None
    """What was found; none where there is nothing to pair."""
    why: str = ""
    """Why there is nothing."""

    @property
    def line(self) -> str:
        """It in words."""
        pair = f"{self.challenger} - {self.champion}"
        if self.difference is None:
            return f"{pair}: no paired test: {self.why}"
        return f"{pair}: {self.difference.mean:+.3f}, {difference_line(self.difference)}"


class Comparison(Settings):
    """Runs beside each other."""

    runs: tuple[ComparedRun, ...]
    """As they were named."""
    settings: dict[str, dict[str, str]]
    """Settings that differ: by dotted key, and by run, as JSON; `absent` where a run has no such key, and of a table
    that it does not have, its kind alone."""
    pairs: tuple[PairedRuns, ...]
    """Every two of them."""


def compare_runs(store: str, names: Sequence[str]) -> Comparison:
    """Compare runs of a store. Raises BadInput for fewer than two, or more than a chart can show."""
    runs = _opened(store, names)
    with ExitStack() as stack:
        for run in runs:
            stack.enter_context(detect_deletion(run))
        descriptions = [described(run) for run in runs]
        return Comparison(
            runs=tuple(map(_compared, descriptions)),
            settings=_differing({run.name: dict(_flat(run.record.config)) for run in runs}),
            pairs=tuple(_pairs(list(zip(runs, descriptions, strict=True)))),
        )


def _opened(store: str, names: Sequence[str]) -> list[Run]:
    names = list(dict.fromkeys(names))
    if not 2 <= len(names) <= MOST:
        raise BadInput(f"compare: expected 2 to {MOST} runs, found {len(names)}: {', '.join(names) or 'none'}")
    return [open_known_run(store, name) for name in names]


def _compared(description: RunDescription) -> ComparedRun:
    evaluations = description.evaluations
    return ComparedRun(
        run=description.name,
        iterations=len(description.iterations),
        before=evaluations[0] if evaluations else None,
        after=evaluations[-1] if evaluations else None,
        price=sum(cost.price for cost in description.costs.values()),
        worker_seconds=sum(cost.worker_seconds for cost in description.costs.values()),
    )


def _flat(value: JsonValue, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Name every setting by its dotted key, tables of a list by their number, with its value as JSON."""
    parts = dict(enumerate(value)) if isinstance(value, list) and any(isinstance(v, Mapping) for v in value) else value
    if isinstance(parts, Mapping) and parts:
        for key, item in parts.items():
            yield from _flat(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, json.dumps(value, sort_keys=True)


def _differing(configs: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    keys = dict.fromkeys(key for config in configs.values() for key in config)
    values = {key: {name: config.get(key, ABSENT) for name, config in configs.items()} for key in keys}
    found = {key: by_run for key, by_run in values.items() if len({*by_run.values()}) > 1}
    tables = tuple(key.removesuffix("kind") for key, by_run in found.items() if _is_part(key, by_run))
    return {
        key: by_run
        for key, by_run in found.items()
        if ABSENT not in by_run.values() or not any(key.startswith(each) and key != f"{each}kind" for each in tables)
    }


def _is_part(key: str, by_run: Mapping[str, str]) -> bool:
    """Whether it is the kind of a table that some run does not have."""
    return key.endswith(".kind") and ABSENT in by_run.values()


def _pairs(runs: Sequence[tuple[Run, RunDescription]]) -> Iterator[PairedRuns]:
    for (one, told), (other, tells) in combinations(runs, 2):
        found, why = None, "one of them has no evaluation yet"
        if told.evaluations and tells.evaluations:
            try:
                found = paired_difference(one, told.evaluations[-1].number, other, tells.evaluations[-1].number)
            except (BadInput, Quarantined) as error:
                why = str(error)
        yield PairedRuns(champion=one.name, challenger=other.name, difference=found, why="" if found else why)


def comparison_page(store: str, comparison: Comparison) -> str:
    """Show the comparison as a page, with curves over each other and the same problems side by side."""
    runs = _opened(store, [each.run for each in comparison.runs])
    columns = _columns(runs)
    charts = drawn_charts(_plans(columns, [run.name for run in runs]), columns)
    browsed = _browsed(runs, comparison)
    keys = [{"setting": key, **values} for key, values in comparison.settings.items()]
    parts = [
        PageSection(name="verdict", title="Verdict", body=rows_table(run_cells(comparison)) + _tests(comparison)),
        PageSection(name="settings", title="Settings that differ", body=rows_table(keys, words=True) or "<p>None.</p>"),
        PageSection(name="curves", title="Curves", body=figures(charts)),
        PageSection(
            name="samples", title="Completions", body=browser() if browsed.groups else "<p>None are there.</p>"
        ),
    ]
    title = " and ".join(run.name for run in runs)
    return page(title, f"runs of {escape(store)}", parts, columns=columns, charts=charts, browsed=browsed)


def run_cells(comparison: Comparison) -> list[dict[str, str]]:
    """The runs as a table shows them."""
    return [
        {
            "run": each.run,
            "iterations": f"{each.iterations:,}",
            "accuracy before": _interval(each.before),
            "after": _interval(each.after),
            "worker s": f"{each.worker_seconds:,.1f}",
            "price": f"{each.price:,.4f}",
        }
        for each in comparison.runs
    ]


def _interval(accuracy: Accuracy | None) -> str:
    return "-" if accuracy is None else f"{accuracy.mean:.3f} ({accuracy.low:.3f} to {accuracy.high:.3f})"


def _tests(comparison: Comparison) -> str:
    return "".join(paragraph(pair.line) for pair in comparison.pairs)


def _columns(runs: Sequence[Run]) -> Columns:
    """The columns that are compared, each with the name of its run."""
    found = Columns()
    for run in runs:
        description = described(run)
        own = columns_of(description.iterations, sealed_iterations(run), description.evaluations)
        names = [*COMPARED.values(), LOW, HIGH]
        found |= {f"{run.name}: {name}": own[name] for name in names if name in own}
    return found


def _plans(columns: Columns, names: Sequence[str]) -> Iterator[ChartPlan]:
    for title, column in COMPARED.items():
        lines = [
            ChartLine(
                label=name,
                column=f"{name}: {column}",
                low=f"{name}: {LOW}" if column == HELDOUT else "",
                high=f"{name}: {HIGH}" if column == HELDOUT else "",
            )
            for name in names
            if f"{name}: {column}" in columns
        ]
        if lines:
            yield ChartPlan(title=title, lines=tuple(lines), is_logarithmic=title.startswith(("KL", "Mismatch")))


def _browsed(runs: Sequence[Run], comparison: Comparison) -> Browsed:
    """The last evaluation of each run, whose problems are the same where their data are."""
    groups: list[BrowsedGroup] = []
    for run, told in zip(runs, comparison.runs, strict=True):
        found = browsed_groups(run, iterations=[], evaluations=[told.after.number] if told.after else [])
        groups += [group.model_copy(update={"batch": f"{run.name} {group.batch}"}) for group in found]
    batches = list(dict.fromkeys(group.batch for group in groups))
    terms = dict.fromkeys(t for run in runs for t in read_recorded(ScoringConfig, run.record.config["scoring"]).terms)
    return Browsed(
        groups=groups, terms=tuple(terms), batch=(batches or [""])[-1], beside=batches[0] if len(batches) > 1 else ""
    )
