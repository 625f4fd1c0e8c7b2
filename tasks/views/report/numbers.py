"""Numbers that a report shows for each iteration, as columns, and the charts of these columns."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from pydantic import JsonValue

from rheostat.infra.config import Settings
from rheostat.infra.store.manifests import Manifest
from rheostat.tasks.run.keys import StageKey
from rheostat.tasks.views.metrics import Accuracy, IterationReport
from rheostat.tasks.views.report.curves import Chart, Series

HELDOUT: Final = "held-out accuracy"
LOW, HIGH = f"{HELDOUT}, low", f"{HELDOUT}, high"
TOTAL: Final = "credit/term_"
SEALED: Final = (
    "credit/term_", "credit/reward_std", "credit/group_reward_std_mean", "credit/truncated_fraction",
    "credit/missing_fraction", "credit/informative_groups", "credit/groups", "update/entropy", "update/kl",
    "update/grad_norm", "update/clip_fraction", "update/learning_rate", "update/loss", "update/value", "update/router",
)  # fmt: skip
"""Prefixes of metrics that become columns under their own name. `IterationReport` has no fields for these metrics."""

Columns = dict[str, list[float | None]]
"""Numbers by column name. Each column is indexed by iteration from 0, with None for missing numbers."""


class ChartLine(Settings):
    """Column that a chart shows as one line."""

    label: str
    """Label in the legend."""
    column: str
    """Name of the column that the line shows."""
    low: str = ""
    """Name of the column with the lower ends of intervals, or empty if there are no intervals."""
    high: str = ""
    """Name of the column with the upper ends of intervals, or empty if there are no intervals."""


class ChartPlan(Settings):
    """Chart to draw: its title and the columns that it shows."""

    title: str
    """Title of the chart."""
    lines: tuple[ChartLine, ...]
    """Lines in the order of the legend. Lines without any number are left out of the chart."""
    is_logarithmic: bool = False
    """Whether the vertical axis is logarithmic."""

    def chart(self, columns: Columns) -> Chart:
        """Fill in the numbers of the columns and return the chart, ready to be drawn."""
        return Chart(
            title=self.title,
            is_logarithmic=self.is_logarithmic,
            series=[
                Series(
                    name=line.label,
                    values=columns[line.column],
                    low=columns.get(line.low, []),
                    high=columns.get(line.high, []),
                )
                for line in self.lines
            ],
        )


def columns_of(
    reports: Sequence[IterationReport], seals: Sequence[Manifest], evaluations: Sequence[Accuracy]
) -> Columns:
    """Return all numbers of a run's iterations and evaluations as columns: the numbers in `rheostat show --json`, and
    further metrics."""
    length = 1 + max([report.iteration for report in reports] + [accuracy.number for accuracy in evaluations] + [0])
    columns = Columns()

    def put(name: str, number: int, value: float) -> None:
        columns.setdefault(name, [None] * length)[number] = value

    for accuracy in evaluations:
        for name, value in ((HELDOUT, accuracy.mean), (LOW, accuracy.low), (HIGH, accuracy.high)):
            put(name, accuracy.number, value)
        for k, share in accuracy.pass_at.items():
            put(f"pass@{k}", accuracy.number, share)
    for report in reports:
        for name, value in numbers_of(report.model_dump(mode="json")):
            put(name, report.iteration, value)
    for sealed in seals:
        for name, value in sealed.metrics.items():
            if name.startswith(SEALED):
                put(name, StageKey.parse(sealed.key).iteration, value)
    _put_shares(columns)
    return {name: values for name, values in columns.items() if any(values)}


def numbers_of(record: Mapping[str, JsonValue], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the dotted key and the value of every number in a nested record, except `iteration`. Booleans become 0 or
    1."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from numbers_of(value, f"{prefix}{name}.")
        elif isinstance(value, bool):
            yield f"{prefix}{name}", int(value)
        elif isinstance(value, int | float) and name != "iteration":
            yield f"{prefix}{name}", value


def _put_shares(columns: Columns) -> None:
    """Add columns that are ratios of two others: the fraction of informative groups, and completion tokens
    per second."""
    for name, over, under in (
        ("informative share", "credit/informative_groups", "credit/groups"),
        ("tokens per second", "costs.rollout.written_tokens", "seconds.rollout"),
    ):
        if over in columns and under in columns:
            pairs = zip(columns[over], columns[under], strict=True)
            columns[name] = [one / other if one is not None and other else None for one, other in pairs]


def plans_of(columns: Columns, terms: Sequence[str]) -> list[ChartPlan]:
    """Return the charts that a report shows, without those for which the run has no numbers."""
    stages = [name for name in columns if name.startswith("seconds.")]
    prices = [name for name in columns if name.endswith(".price")]
    charts = [
        ("Accuracy", [(HELDOUT, HELDOUT), ("of rollouts", "accuracy")]),
        ("Reward by term", [("total", "reward"), *((term, f"{TOTAL}{term}_mean") for term in terms)]),
        ("Standard deviation of rewards", [
            ("all completions", "credit/reward_std"),
            ("within groups", "credit/group_reward_std_mean"),
        ]),
        ("Length in tokens", [("mean", "length")]),
        ("Shares", [
            ("completions cut off", "credit/truncated_fraction"),
            ("informative groups", "informative share"),
            ("missing scores", "credit/missing_fraction"),
        ]),
        ("Entropy, nats per token", [("entropy", "update/entropy")]),
        ("KL, nats per token", [
            ("of the update", "kl"), *_columns_named(columns, "update/kl", besides="update/kl_old"),
        ]),
        ("Mismatch of engine and trainer, nats", [("mean", "mismatch"), ("largest", "mismatch_max")]),
        ("Clipped share of tokens", [
            ("low", "update/clip_fraction_low"),
            ("high", "update/clip_fraction_high"),
            ("importance weight", "importance_cut"),
        ]),
        ("Gradient norm", _columns_named(columns, "update/grad_norm")),
        ("Loss", _columns_named(columns, "update/loss")),
        ("Episodes", [("turns", "episodes.turns"), ("calls", "episodes.calls")]),
        ("Seconds by stage", [(name.removeprefix("seconds."), name) for name in stages]),
        ("Generated tokens per second", [("tokens per second", "tokens per second")]),
        ("Price by role", [(name.split(".")[1], name) for name in prices]),
    ]  # fmt: skip
    plans = (_plan_chart(title, [(label, name) for label, name in lines if name in columns]) for title, lines in charts)
    return [plan for plan in plans if plan.lines]


def _plan_chart(title: str, lines: Sequence[tuple[str, str]]) -> ChartPlan:
    ends = {HELDOUT: {"low": LOW, "high": HIGH}}
    chart_lines = tuple(ChartLine(label=label, column=name, **ends.get(name, {})) for label, name in lines)
    return ChartPlan(title=title, lines=chart_lines, is_logarithmic=title.startswith(("KL", "Mismatch")))


def _columns_named(columns: Columns, beginning: str, *, besides: str = "") -> list[tuple[str, str]]:
    """Return (label, column) for each column whose name starts with `beginning`, except the column `besides`."""
    names = [name for name in columns if name.startswith(beginning) and name != besides]
    return [(name.partition("/")[2].removeprefix("kl_").replace("_", " "), name) for name in names]
