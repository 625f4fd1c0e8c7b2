"""Comparison of several runs: the settings that differ, shared charts of their curves, and paired tests of accuracy."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from html import escape
from itertools import combinations
from typing import Final

from pydantic import JsonValue

from rheostat.infra.config import Settings, read_recorded
from rheostat.infra.errors import BadInput, Quarantined
from rheostat.infra.renamed import with_present_names
from rheostat.infra.store.runs import Run
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.gate.comparison import PairedDifference
from rheostat.tasks.config.run import RunConfig
from rheostat.tasks.lineage.differences import find_input_differences, read_inputs
from rheostat.tasks.views.metrics import Accuracy, sealed_iterations
from rheostat.tasks.views.plots import first_own_point
from rheostat.tasks.views.report.curves import COLORS
from rheostat.tasks.views.report.numbers import HELDOUT, HIGH, LOW, ChartLine, ChartPlan, Columns, columns_of
from rheostat.tasks.views.report.page import (
    Browsed,
    PageSection,
    browser,
    drawn_charts,
    figures,
    page,
    paragraph,
    rows_table,
)
from rheostat.tasks.views.report.samples import BrowsedGroup, browsed_groups
from rheostat.tasks.views.report.sections import difference_line, paired_difference
from rheostat.tasks.views.runs import RunDescription, describe_open_run, detect_deletion, open_known_run

MOST: Final = len(COLORS)
"""Maximum number of runs in a comparison, because a chart has only this number of distinguishable lines."""
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
"""Columns to compare, by title of the chart. Columns are named as in `numbers.columns_of`."""


ABSENT: Final = "absent"


class ComparedRun(Settings):
    """Results of one run in the comparison."""

    run: str
    """Name of the run."""
    iterations: int
    """Number of completed iterations."""
    before: Accuracy | None
    """First held-out evaluation, or None if the run has no evaluation yet."""
    after: Accuracy | None
    """Last held-out evaluation, or None if the run has no evaluation yet."""
    forked_from: str
    """Run and iteration at which the run begins if it is a fork, such as `demo@12`. Otherwise empty."""
    price: float
    """Total cost of the run, computed from its configured prices."""
    worker_seconds: float
    """Total time for which workers of the run were reserved, in seconds."""


class PairedRuns(Settings):
    """Comparison of the last held-out evaluations of two runs, with a statistical test over the problems that both
    evaluated."""

    champion: str
    """Name of the run that the user named first. Differences are relative to it."""
    challenger: str
    """Name of the run that the user named second. A positive difference means that this run is better."""
    difference: PairedDifference | None
    """Difference of the accuracies, second run minus first run, with its test. None if the two runs cannot
    be compared."""
    why: str = ""
    """Reason why the two runs cannot be compared. Empty if `difference` is set."""
    inputs: tuple[str, ...] = ()
    """Differences of training prompts, code, data files and versions of libraries, one line each."""

    @property
    def line(self) -> str:
        """Sentence for the terminal that states the difference, or why there is none."""
        pair = f"{self.challenger} - {self.champion}"
        if self.difference is None:
            return f"{pair}: no paired test: {self.why}"
        return f"{pair}: {self.difference.mean:+.3f}, {difference_line(self.difference)}"

    @property
    def input_lines(self) -> list[str]:
        """Lines that state the different inputs, each with the names of the two runs."""
        return [f"{self.champion} and {self.challenger}: {line}" for line in self.inputs]


class Comparison(Settings):
    """Comparison of two or more runs: results, different settings, and tests of the differences."""

    runs: tuple[ComparedRun, ...]
    """Compared runs, in the order in which the user named them."""
    settings: dict[str, dict[str, str]]
    """JSON value of each differing setting, by dotted key and then by run name. The value is `absent` if a run has no
    such key. If a run lacks a whole table of settings, only the `kind` of this table is listed."""
    pairs: tuple[PairedRuns, ...]
    """Comparison of each two runs in `runs`."""


def compare_runs(store: str, names: Sequence[str]) -> Comparison:
    """Compare the results and settings of the named runs of a store.

    Raises BadInput if fewer than two runs are named, more than a chart can show, or a name is unknown.
    """
    runs = _open_runs(store, names)
    with ExitStack() as stack:
        for run in runs:
            stack.enter_context(detect_deletion(run))
        descriptions = [describe_open_run(run) for run in runs]
        return Comparison(
            runs=tuple(map(_summarize_run, descriptions)),
            settings=_find_differing(
                {run.name: dict(_flatten(with_present_names(run.record.config, RunConfig))) for run in runs}
            ),
            pairs=tuple(_compare_pairs(list(zip(runs, descriptions, strict=True)))),
        )


def _open_runs(store: str, names: Sequence[str]) -> list[Run]:
    names = list(dict.fromkeys(names))
    if not 2 <= len(names) <= MOST:
        raise BadInput(f"compare needs the names of 2 to {MOST} runs, found {len(names)}: {', '.join(names) or 'none'}")
    return [open_known_run(store, name) for name in names]


def _summarize_run(description: RunDescription) -> ComparedRun:
    evaluations = description.evaluations
    return ComparedRun(
        run=description.name,
        iterations=len(description.iterations),
        before=evaluations[0] if evaluations else None,
        after=evaluations[-1] if evaluations else None,
        forked_from=description.forked_from,
        price=sum(cost.price for cost in description.costs.values()),
        worker_seconds=sum(cost.worker_seconds for cost in description.costs.values()),
    )


def _flatten(value: JsonValue, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the JSON value of every setting. A list of tables contributes the index of each table to
    the key."""
    parts = dict(enumerate(value)) if isinstance(value, list) and any(isinstance(v, Mapping) for v in value) else value
    if isinstance(parts, Mapping) and parts:
        for key, item in parts.items():
            yield from _flatten(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, json.dumps(value, sort_keys=True)


def _find_differing(configs: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    keys = dict.fromkeys(key for config in configs.values() for key in config)
    values = {key: {name: config.get(key, ABSENT) for name, config in configs.items()} for key in keys}
    differing = {key: by_run for key, by_run in values.items() if len({*by_run.values()}) > 1}
    tables = tuple(key.removesuffix("kind") for key, by_run in differing.items() if _is_part(key, by_run))
    return {
        key: by_run
        for key, by_run in differing.items()
        if ABSENT not in by_run.values() or not any(key.startswith(each) and key != f"{each}kind" for each in tables)
    }


def _is_part(key: str, by_run: Mapping[str, str]) -> bool:
    """Return whether a key is the `kind` of a settings table that at least one run does not have."""
    return key.endswith(".kind") and ABSENT in by_run.values()


def _compare_pairs(runs: Sequence[tuple[Run, RunDescription]]) -> Iterator[PairedRuns]:
    inputs = {run.name: read_inputs(run) for run, _ in runs}
    for (one, first), (other, second) in combinations(runs, 2):
        difference, why = None, "one of the two runs has no evaluation yet"
        if first.evaluations and second.evaluations:
            try:
                difference = paired_difference(one, first.evaluations[-1].number, other, second.evaluations[-1].number)
            except (BadInput, Quarantined) as error:
                why = str(error)
        yield PairedRuns(
            champion=one.name,
            challenger=other.name,
            difference=difference,
            why="" if difference else why,
            inputs=tuple(find_input_differences(inputs[one.name], inputs[other.name])),
        )


def comparison_page(store: str, comparison: Comparison) -> str:
    """Return an HTML page that compares runs: curves in the same charts, and completions for the same problems side by
    side."""
    runs = _open_runs(store, [each.run for each in comparison.runs])
    columns = _read_columns(runs)
    charts = drawn_charts(_plan_charts(columns, [run.name for run in runs]), columns)
    browsed = _read_completions(runs, comparison)
    keys = [{"setting": key, **values} for key, values in comparison.settings.items()]
    parts = [
        PageSection(
            name="verdict", title="Verdict", body=rows_table(run_cells(comparison)) + _test_paragraphs(comparison)
        ),
        PageSection(name="settings", title="Different settings", body=rows_table(keys, words=True) or "<p>None.</p>"),
        PageSection(
            name="inputs",
            title="Different inputs",
            body="".join(paragraph(line) for pair in comparison.pairs for line in pair.input_lines) or "<p>None.</p>",
        ),
        PageSection(name="curves", title="Curves", body=figures(charts)),
        PageSection(
            name="samples",
            title="Completions",
            body=browser() if browsed.groups else "<p>No completions are stored.</p>",
        ),
    ]
    title = " and ".join(run.name for run in runs)
    return page(title, f"runs of {escape(store)}", parts, columns=columns, charts=charts, browsed=browsed)


def run_cells(comparison: Comparison) -> list[dict[str, str]]:
    """Return the rows of the table of results, one per run, with formatted cells."""
    return [
        {
            "run": each.run,
            **({"forked from": each.forked_from or "-"} if any(run.forked_from for run in comparison.runs) else {}),
            "iterations": f"{each.iterations:,}",
            "accuracy before": _interval(each.before),
            "after": _interval(each.after),
            "worker seconds": f"{each.worker_seconds:,.1f}",
            "price": f"{each.price:,.4f}",
        }
        for each in comparison.runs
    ]


def _interval(accuracy: Accuracy | None) -> str:
    return "-" if accuracy is None else f"{accuracy.mean:.3f} ({accuracy.low:.3f} to {accuracy.high:.3f})"


def _test_paragraphs(comparison: Comparison) -> str:
    return "".join(paragraph(pair.line) for pair in comparison.pairs)


def _read_columns(runs: Sequence[Run]) -> Columns:
    """Return the numbers that are compared, for all runs. Each column has the name "run: column". The numbers of a fork
    begin at its last shared iteration if its parent is among the runs, so that its curve starts on the curve of its
    parent."""
    columns, names_of_runs = Columns(), [run.name for run in runs]
    for run in runs:
        first = first_own_point(run, names_of_runs)
        description = describe_open_run(run)
        own = columns_of(description.iterations, sealed_iterations(run), description.evaluations)
        names = [*COMPARED.values(), LOW, HIGH]
        columns |= {f"{run.name}: {name}": [*([None] * first), *own[name][first:]] for name in names if name in own}
    return columns


def _plan_charts(columns: Columns, names: Sequence[str]) -> Iterator[ChartPlan]:
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


def _read_completions(runs: Sequence[Run], comparison: Comparison) -> Browsed:
    """Return the completions of each run's last evaluation, to be shown side by side. Problems are the same if the runs
    use the same data."""
    groups: list[BrowsedGroup] = []
    for run, compared in zip(runs, comparison.runs, strict=True):
        run_groups = browsed_groups(run, iterations=[], evaluations=[compared.after.number] if compared.after else [])
        groups += [group.model_copy(update={"batch": f"{run.name} {group.batch}"}) for group in run_groups]
    batches = list(dict.fromkeys(group.batch for group in groups))
    terms = dict.fromkeys(t for run in runs for t in read_recorded(ScoringConfig, run.record.config["scoring"]).terms)
    return Browsed(
        groups=groups, terms=tuple(terms), batch=(batches or [""])[-1], beside=batches[0] if len(batches) > 1 else ""
    )
