"""Measurements of finished stages, and their conversion to the inputs of placement policies.

Times of units are fitted by lines, from sums that are stored instead of the data. Both coefficients of a line are at
least 0. All records are immutable and can be stored as JSON.
"""

from collections.abc import Iterable
from math import log, sqrt
from typing import Literal

import numpy as np

from infra.config import Settings
from infra.statistics import normal_quantile
from placement.records import Demand, Floats, Pace, ResizeCost

MIN_VARIATION = 0.01
"""Squared coefficient of variation of x below which base and slope of a line cannot be distinguished."""


class LineSums(Settings):
    """Sums from which a line y = base + slope · x is fitted, with exponentially decreasing weights of older data."""

    count: float = 0.0
    """Sum of the weights of the data."""
    x: float = 0.0
    """Weighted sum of x."""
    xx: float = 0.0
    """Weighted sum of x²."""
    y: float = 0.0
    """Weighted sum of y."""
    xy: float = 0.0
    """Weighted sum of x · y."""

    def plus(self, other: "LineSums", *, decay: float = 1.0) -> "LineSums":
        """Return these sums multiplied by `decay`, plus the other sums."""
        return LineSums(
            count=decay * self.count + other.count,
            x=decay * self.x + other.x,
            xx=decay * self.xx + other.xx,
            y=decay * self.y + other.y,
            xy=decay * self.xy + other.xy,
        )


def fit_line(sums: LineSums, *, prior: tuple[float, float]) -> tuple[float, float]:
    """Return (base, slope) of the least-squares line with both at least 0, or the prior if there is no data.

    If x hardly varied, the prior is scaled to the mean of y.
    """
    if sums.count <= 0 or sums.x <= 0:
        return prior
    variance = sums.count * sums.xx - sums.x**2
    if variance <= MIN_VARIATION * sums.x**2:
        return _scale_prior(sums, prior)
    slope = (sums.count * sums.xy - sums.x * sums.y) / variance
    base = (sums.y - slope * sums.x) / sums.count
    if slope < 0:
        return max(sums.y / sums.count, 0.0), 0.0
    if base < 0:
        return 0.0, max(sums.xy / sums.xx, 0.0)
    return base, slope


def _scale_prior(sums: LineSums, prior: tuple[float, float]) -> tuple[float, float]:
    mean = max(sums.y / sums.count, 0.0)
    expected = prior[0] + prior[1] * sums.x / sums.count
    if expected <= 0:
        return mean, 0.0
    return prior[0] * mean / expected, prior[1] * mean / expected


Role = Literal["rollout", "scoring"]

SAMPLE = 512
"""Number of lengths stored for each role."""

FADE = 0.5
"""Factor by which the weight of a stage's step times decreases with each later stage."""

BUSY_KEPT = 0.7
"""Weight of the old value in the moving average of busy seconds. The new value has weight 0.3."""

RESIZE_KEPT = 0.7
"""Weight of the old value in the moving average of the cost of moving."""

LIKENESS_KEPT = 0.7
"""Weight of the old value in the moving average of the correlation within a unit."""

MAX_LIKENESS = 0.95
"""Maximum correlation between the log lengths of one unit."""

DRIFT = 0.2
"""Assumed change of the log mean length between stages, before the second stage."""

DRIFT_KEPT = 0.7
"""Weight of the old value in the moving average of squared changes of the log mean length."""

MAX_DRIFT = 1.0
"""Maximum standard deviation of the log mean length that predictions assume."""

MOVES_KEPT = 64
"""Number of recent moves from which the 95th percentile is computed."""


class UnitObservation(Settings):
    """Measurements of one finished unit, from its manifest. Sums over steps are 0 if the engine counts no steps."""

    role: Role
    """Role of the worker."""
    sequences: int
    """Number of sequences decoded. Each vote and each repeated attempt of a judge is one sequence."""
    seconds: float
    """Time from the start of the unit on a worker to its commit, without loading weights, which is part of the cost of
    moving."""
    steps: float = 0.0
    """Number of decoding steps."""
    step_sequences: float = 0.0
    """Sum of the batch sizes over steps."""
    step_sequences_squared: float = 0.0
    """Sum of the squared batch sizes over steps."""
    step_seconds: float = 0.0
    """Sum of the step times."""
    step_sequence_seconds: float = 0.0
    """Sum of batch size × seconds over steps."""
    lengths: tuple[float, ...] = ()
    """Evenly spaced order statistics of the lengths, including the smallest and the largest."""


class Prior(Settings):
    """Assumptions about a role before its first measurement."""

    median_tokens: float = 128.0
    """Median length."""
    sigma: float = 0.8
    """Standard deviation of the log lengths, which are assumed to be normal."""
    max_tokens: float = 4096.0
    """Maximum length."""
    pace: Pace = Pace(base_seconds=0.02, per_sequence_seconds=0.0005)
    """Assumed speed of a worker."""

    def lengths(self) -> tuple[float, ...]:
        """Return the lengths at 64 evenly spaced quantiles."""
        normals = normal_quantile((np.arange(64) + 0.5) / 64)
        lengths = np.minimum(self.median_tokens * np.exp(self.sigma * normals), self.max_tokens)
        return tuple(float(length) for length in lengths)


class RoleMeasurements(Settings):
    """Accumulated measurements of a role."""

    stages: int = 0
    """Number of stages measured."""
    steps: LineSums = LineSums()
    """Sums for the line of step time against batch size."""
    rest: LineSums = LineSums()
    """Sums for the line of a unit's time outside of its steps against its number of sequences."""
    lengths: tuple[float, ...] = ()
    """Sample of recent lengths, sorted. At least half of them are from the last stage."""
    likeness: float = 0.0
    """Correlation between the log lengths of two sequences of one unit, as a moving average."""
    mean_length: float = 0.0
    """Mean length in the last stage."""
    drift: float = DRIFT
    """Square root of the moving average of squared changes of the log mean length between stages. An assumption before
    the second stage."""
    busy_seconds: float = 0.0
    """Worker-seconds in a stage, as a moving average."""


class Measurements(Settings):
    """Accumulated measurements of both roles and of moves between them."""

    rollout: RoleMeasurements = RoleMeasurements()
    """Measurements of rollout."""
    scoring: RoleMeasurements = RoleMeasurements()
    """Measurements of scoring."""
    moves: tuple[float, ...] = ()
    """Seconds of recent moves, oldest first."""
    move_seconds: float | None = None
    """Moving average of the seconds of a move. None before the first move."""

    def observe(self, units: Iterable[UnitObservation], *, moves: Iterable[float] = ()) -> "Measurements":
        """Return the measurements after another finished stage.

        `units` must be all units of the stage, because those that finish early are the short ones. `moves` are the
        seconds of the stage's moves, from the decision to the first work in the new role.
        """
        observed, moves = tuple(units), tuple(moves)
        average = self.move_seconds
        for seconds in moves:
            average = seconds if average is None else RESIZE_KEPT * average + (1 - RESIZE_KEPT) * seconds
        return Measurements(
            rollout=_observe(self.rollout, [unit for unit in observed if unit.role == "rollout"]),
            scoring=_observe(self.scoring, [unit for unit in observed if unit.role == "scoring"]),
            moves=(*self.moves, *moves)[-MOVES_KEPT:],
            move_seconds=average,
        )

    def resize(self) -> ResizeCost:
        """Return the time needed to move a worker, or an assumption before the first move."""
        if self.move_seconds is None:
            return ResizeCost()
        return ResizeCost(mean_seconds=self.move_seconds, p95_seconds=float(np.quantile(self.moves, 0.95)))

    def pace(self, role: Role, *, prior: Pace) -> Pace:
        """Return the speed of a worker of the role."""
        known = self.rollout if role == "rollout" else self.scoring
        # Units without decoding steps (classifiers, log-probs) spend all their time outside of steps.
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
        """Return the work of the role in a stage of `units` units with `sequences` sequences each."""
        known = self.rollout if role == "rollout" else self.scoring
        prior = prior or Prior()
        return Demand(
            units=units,
            sequences=sequences,
            lengths=known.lengths or prior.lengths(),
            likeness=known.likeness,
            drift=min(known.drift, MAX_DRIFT),
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
    lengths = [_expand_lengths(unit) for unit in units if unit.lengths]
    mean = float(np.concatenate(lengths).mean()) if lengths else 0.0
    return RoleMeasurements(
        stages=known.stages + 1,
        steps=known.steps.plus(_total(_steps(unit) for unit in units), decay=FADE),
        rest=known.rest.plus(_total(_rest(unit) for unit in units), decay=FADE),
        lengths=_merge_lengths(known.lengths, lengths, seed=known.stages),
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


def _expand_lengths(unit: UnitObservation) -> Floats:
    """Return one length for each sequence of a unit, by interpolating the unit's order statistics."""
    return np.interp(np.linspace(0, 1, max(unit.sequences, 1)), np.linspace(0, 1, len(unit.lengths)), unit.lengths)


def _merge_lengths(old: tuple[float, ...], lengths: list[Floats], *, seed: int) -> tuple[float, ...]:
    """Return a sorted sample of at most `SAMPLE` lengths, with at most as many old as new ones."""
    if not lengths:
        return old
    rng = np.random.default_rng(seed)
    new, past = np.concatenate(lengths), np.asarray(old)
    past = _thin(past, min(past.size, new.size, SAMPLE // 2), rng)
    new = _thin(new, min(new.size, SAMPLE - past.size), rng)
    return tuple(float(length) for length in np.sort(np.concatenate([past, new])))


def _thin(lengths: Floats, count: int, rng: np.random.Generator) -> Floats:
    """Return one random length from each of `count` equal slices of the sorted lengths, so that the tails are kept."""
    at = (np.arange(count) + rng.random(count)) * lengths.size / max(count, 1)
    return np.asarray(np.sort(lengths)[np.minimum(at.astype(np.int64), max(lengths.size - 1, 0))])


def _drift(mean: float, known: RoleMeasurements) -> float:
    if not (known.mean_length and mean):
        return known.drift
    return sqrt(DRIFT_KEPT * known.drift**2 + (1 - DRIFT_KEPT) * log(mean / known.mean_length) ** 2)


def _likeness(lengths: list[Floats], known: RoleMeasurements) -> float:
    """Return the intraclass correlation of log lengths (ANOVA), from the variances between and within units."""
    logs = [np.log(np.maximum(unit, 1.0)) for unit in lengths if unit.size > 1]
    if len(logs) < 3:
        return known.likeness
    size = float(np.mean([unit.size for unit in logs]))
    between = size * float(np.var([unit.mean() for unit in logs], ddof=1))
    within = float(np.mean([unit.var(ddof=1) for unit in logs]))
    total = between + (size - 1) * within
    correlation = min(max((between - within) / total, 0.0), MAX_LIKENESS) if total > 0 else 0.0
    return LIKENESS_KEPT * known.likeness + (1 - LIKENESS_KEPT) * correlation if known.stages else correlation
