"""From what stages measured to what policies decide from. Frozen, and JSON like all of placement's records.

Durations of units come from lines through summed statistics, of which neither part may be negative.
"""

from collections.abc import Iterable
from math import log, sqrt
from typing import Literal

import numpy as np

from infra.config import Settings
from infra.statistics import normal_quantile
from placement.records import Demand, Floats, Pace, ResizeCost

LEAST_VARIATION = 0.01
"""Below this squared coefficient of variation of x nothing tells base from slope."""


class LineSums(Settings):
    """Sufficient statistics of y on x, exponentially forgotten."""

    count: float = 0.0
    x: float = 0.0
    xx: float = 0.0
    y: float = 0.0
    xy: float = 0.0

    def plus(self, other: "LineSums", *, decay: float = 1.0) -> "LineSums":
        """Return these sums, faded by `decay`, with others added."""
        return LineSums(
            count=decay * self.count + other.count,
            x=decay * self.x + other.x,
            xx=decay * self.xx + other.xx,
            y=decay * self.y + other.y,
            xy=decay * self.xy + other.xy,
        )


def fit_line(sums: LineSums, *, prior: tuple[float, float]) -> tuple[float, float]:
    """Return (base, slope), both at least 0, with the least squared error; the prior where there is nothing to fit.

    Where x hardly varied, the mean of y is kept and parted as in the prior.
    """
    if sums.count <= 0 or sums.x <= 0:
        return prior
    variance = sums.count * sums.xx - sums.x**2
    if variance <= LEAST_VARIATION * sums.x**2:
        return _scaled(sums, prior)
    slope = (sums.count * sums.xy - sums.x * sums.y) / variance
    base = (sums.y - slope * sums.x) / sums.count
    if slope < 0:
        return max(sums.y / sums.count, 0.0), 0.0
    if base < 0:
        return 0.0, max(sums.xy / sums.xx, 0.0)
    return base, slope


def _scaled(sums: LineSums, prior: tuple[float, float]) -> tuple[float, float]:
    mean = max(sums.y / sums.count, 0.0)
    expected = prior[0] + prior[1] * sums.x / sums.count
    if expected <= 0:
        return mean, 0.0
    return prior[0] * mean / expected, prior[1] * mean / expected


Role = Literal["rollout", "scoring"]

SAMPLE = 512
"""Lengths kept per role."""

FADE = 0.5
"""What a stage's step times weigh one stage later."""

BUSY_KEPT = 0.7
"""EMA of busy seconds: 0.7 of the old, 0.3 of the new."""

RESIZE_KEPT = 0.7

LIKENESS_KEPT = 0.7

LIKENESS_MOST = 0.95

DRIFT = 0.2

DRIFT_KEPT = 0.7

DRIFT_MOST = 1.0

MOVES_KEPT = 64
"""Moves behind the 95th percentile."""


class UnitObservation(Settings):
    """One finished unit, as its manifest tells. Steps may be missing (0) where an engine does not count them."""

    role: Role
    sequences: int
    """Sequences decoded; judges' votes and second attempts counted each."""
    seconds: float
    """From the worker's taking it to its commit; without loading weights, which is a cost of moving."""
    steps: float = 0.0
    step_sequences: float = 0.0
    """Sum of the batch sizes."""
    step_sequences_squared: float = 0.0
    step_seconds: float = 0.0
    step_sequence_seconds: float = 0.0
    """Sum of batch size × seconds."""
    lengths: tuple[float, ...] = ()
    """Evenly spaced order statistics of the lengths, smallest and largest included."""


class Prior(Settings):
    """What is assumed of a role before its first measurement."""

    median_tokens: float = 128.0
    sigma: float = 0.8
    """Of the log-normal distribution of lengths."""
    max_tokens: float = 4096.0
    """Where lengths are cut."""
    pace: Pace = Pace(base_seconds=0.02, per_sequence_seconds=0.0005)

    def lengths(self) -> tuple[float, ...]:
        """Lengths at 64 evenly spaced quantiles."""
        normals = normal_quantile((np.arange(64) + 0.5) / 64)
        lengths = np.minimum(self.median_tokens * np.exp(self.sigma * normals), self.max_tokens)
        return tuple(float(length) for length in lengths)


class RoleMeasurements(Settings):
    """What is known of a role."""

    stages: int = 0
    steps: LineSums = LineSums()
    """Step time on batch size."""
    rest: LineSums = LineSums()
    """What units take beside their steps, on their sequences."""
    lengths: tuple[float, ...] = ()
    """Sorted; at least half of them from the last stage."""
    likeness: float = 0.0
    """Correlation of two log lengths of one unit, EMA."""
    mean_length: float = 0.0
    """Of the last stage."""
    drift: float = DRIFT
    """Root of the EMA of squared changes of log mean length from stage to stage; a guess before the second stage."""
    busy_seconds: float = 0.0
    """Worker-seconds per stage."""


class Measurements(Settings):
    """What is known of both roles and of moving; `observe` returns what is known after another stage."""

    rollout: RoleMeasurements = RoleMeasurements()
    scoring: RoleMeasurements = RoleMeasurements()
    moves: tuple[float, ...] = ()
    """Seconds of recent moves, oldest first."""
    move_seconds: float | None = None
    """EMA."""

    def observe(self, units: Iterable[UnitObservation], *, moves: Iterable[float] = ()) -> "Measurements":
        """Take in a stage that has ended: all of its units, for those that finish early are short ones; and its moves,
        in seconds from the wish to the first work elsewhere."""
        seen, moves = tuple(units), tuple(moves)
        average = self.move_seconds
        for seconds in moves:
            average = seconds if average is None else RESIZE_KEPT * average + (1 - RESIZE_KEPT) * seconds
        return Measurements(
            rollout=_observe(self.rollout, [unit for unit in seen if unit.role == "rollout"]),
            scoring=_observe(self.scoring, [unit for unit in seen if unit.role == "scoring"]),
            moves=(*self.moves, *moves)[-MOVES_KEPT:],
            move_seconds=average,
        )

    def resize(self) -> ResizeCost:
        """What moving a worker costs; a guess before the first move."""
        if self.move_seconds is None:
            return ResizeCost()
        return ResizeCost(mean_seconds=self.move_seconds, p95_seconds=float(np.quantile(self.moves, 0.95)))

    def pace(self, role: Role, *, prior: Pace) -> Pace:
        """How fast a worker of the role is."""
        known = self.rollout if role == "rollout" else self.scoring
        # Units without steps (a sequence classifier, log-probs) take all their time beside them.
        without = known.stages > 0 and known.steps.count == 0
        guess = (0.0, 0.0) if without else (prior.base_seconds, prior.per_sequence_seconds)
        base, slope = fit_line(known.steps, prior=guess)
        unit, setup = fit_line(known.rest, prior=(prior.unit_seconds, prior.setup_seconds))
        return Pace(base_seconds=base, per_sequence_seconds=slope, setup_seconds=setup, unit_seconds=unit)

    def demand(
        self,
        role: Role,
        *,
        units: int,
        sequences: int,
        slots: int = 1,
        least_slots: int = 1,
        units_at_once: int = 1,
        prior: Prior | None = None,
    ) -> Demand:
        """What the role has to do in a stage of `units` units of `sequences` sequences each."""
        known = self.rollout if role == "rollout" else self.scoring
        prior = prior or Prior()
        return Demand(
            units=units,
            sequences=sequences,
            lengths=known.lengths or prior.lengths(),
            likeness=known.likeness,
            drift=min(known.drift, DRIFT_MOST),
            pace=self.pace(role, prior=prior.pace),
            slots=slots,
            least_slots=least_slots,
            units_at_once=units_at_once,
            busy_seconds=known.busy_seconds,
            measured=known.stages > 0,
        )


def _observe(known: RoleMeasurements, units: list[UnitObservation]) -> RoleMeasurements:
    if not units:
        return known
    busy = sum(unit.seconds for unit in units)
    lengths = [_expanded(unit) for unit in units if unit.lengths]
    mean = float(np.concatenate(lengths).mean()) if lengths else 0.0
    return RoleMeasurements(
        stages=known.stages + 1,
        steps=known.steps.plus(_total(_steps(unit) for unit in units), decay=FADE),
        rest=known.rest.plus(_total(_rest(unit) for unit in units), decay=FADE),
        lengths=_merged(known.lengths, lengths, seed=known.stages),
        likeness=_likeness(lengths, known),
        mean_length=mean,
        drift=_drift(mean, known),
        busy_seconds=BUSY_KEPT * known.busy_seconds + (1 - BUSY_KEPT) * busy if known.stages else busy,
    )


def _steps(unit: UnitObservation) -> LineSums:
    return LineSums(
        count=unit.steps,
        x=unit.step_sequences,
        xx=unit.step_sequences_squared,
        y=unit.step_seconds,
        xy=unit.step_sequence_seconds,
    )


def _rest(unit: UnitObservation) -> LineSums:
    rest, b = max(unit.seconds - unit.step_seconds, 0.0), float(unit.sequences)
    return LineSums(count=1.0, x=b, xx=b * b, y=rest, xy=rest * b)


def _total(parts: Iterable[LineSums]) -> LineSums:
    total = LineSums()
    for part in parts:
        total = total.plus(part)
    return total


def _expanded(unit: UnitObservation) -> Floats:
    """A unit's order statistics are its quantile function: read it as often as the unit has sequences."""
    return np.interp(np.linspace(0, 1, max(unit.sequences, 1)), np.linspace(0, 1, len(unit.lengths)), unit.lengths)


def _merged(old: tuple[float, ...], lengths: list[Floats], *, seed: int) -> tuple[float, ...]:
    """A sorted sample of at most `SAMPLE` lengths, old ones at most as many as new ones."""
    if not lengths:
        return old
    rng = np.random.default_rng(seed)
    new, past = np.concatenate(lengths), np.asarray(old)
    past = _thinned(past, min(past.size, new.size, SAMPLE // 2), rng)
    new = _thinned(new, min(new.size, SAMPLE - past.size), rng)
    return tuple(float(length) for length in np.sort(np.concatenate([past, new])))


def _thinned(lengths: Floats, count: int, rng: np.random.Generator) -> Floats:
    """One length by chance out of each of `count` equal slices of the sorted lengths: no tail is biased or lost."""
    at = (np.arange(count) + rng.random(count)) * lengths.size / max(count, 1)
    return np.asarray(np.sort(lengths)[np.minimum(at.astype(np.int64), max(lengths.size - 1, 0))])


def _drift(mean: float, known: RoleMeasurements) -> float:
    if not (known.mean_length and mean):
        return known.drift
    return sqrt(DRIFT_KEPT * known.drift**2 + (1 - DRIFT_KEPT) * log(mean / known.mean_length) ** 2)


def _likeness(lengths: list[Floats], known: RoleMeasurements) -> float:
    """Intraclass correlation of log lengths, from the variance of units' means against that inside units (ANOVA)."""
    logs = [np.log(np.maximum(unit, 1.0)) for unit in lengths if unit.size > 1]
    if len(logs) < 3:
        return known.likeness
    size = float(np.mean([unit.size for unit in logs]))
    between = size * float(np.var([unit.mean() for unit in logs], ddof=1))
    within = float(np.mean([unit.var(ddof=1) for unit in logs]))
    total = between + (size - 1) * within
    found = min(max((between - within) / total, 0.0), LIKENESS_MOST) if total > 0 else 0.0
    return LIKENESS_KEPT * known.likeness + (1 - LIKENESS_KEPT) * found if known.stages else found
