"""Measurements of finished stages, and their conversion to the inputs of placement policies.

Step times are modeled as a line over the batch size, and the time of a work unit outside its steps as a line over its
number of sequences. The lines are fitted by least squares from running sums, so the individual measurements need not
be stored. Base and slope of each line are at least 0. All records are immutable and can be stored as JSON.
"""

from collections.abc import Iterable
from math import log, sqrt
from typing import Literal

import numpy as np

from rheostat.infra.config import Settings
from rheostat.infra.statistics import normal_quantile
from rheostat.placement.records import Demand, Floats, Pace, ResizeCost

MIN_VARIATION = 0.01
"""Minimum squared coefficient of variation of x for which both the base and the slope of a line are fitted. Below this
value, they cannot be distinguished."""


class LineSums(Settings):
    """Weighted sums from which a line y = base + slope · x is fitted. The weight of data decreases exponentially with
    age."""

    count: float = 0.0
    """Sum of the weights of all data points."""
    x: float = 0.0
    """Weighted sum of x."""
    xx: float = 0.0
    """Weighted sum of x²."""
    y: float = 0.0
    """Weighted sum of y."""
    xy: float = 0.0
    """Weighted sum of x · y."""

    def add(self, other: "LineSums", *, decay: float = 1.0) -> "LineSums":
        """Return the sum of this record and another one. This record is multiplied by `decay` before."""
        return LineSums(
            count=decay * self.count + other.count,
            x=decay * self.x + other.x,
            xx=decay * self.xx + other.xx,
            y=decay * self.y + other.y,
            xy=decay * self.xy + other.xy,
        )


def fit_line(sums: LineSums, *, prior: tuple[float, float]) -> tuple[float, float]:
    """Fit a line by least squares and return its (base, slope), both at least 0. Return the prior if there is no data.

    If x varies too little to fit both values, the prior line is scaled so that it passes through the mean of the data.
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

MAX_LENGTHS = 512
"""Maximum number of recent sequence lengths that are kept for each role."""

STEP_DECAY = 0.5
"""Factor by which the weight of earlier step times is reduced after each stage."""

BUSY_DECAY = 0.7
"""Weight of the old value in the moving average of the worker-seconds per stage. The new value has weight 0.3."""

RESIZE_DECAY = 0.7
"""Weight of the old value in the moving average of the time that it takes to move a worker to the other role."""

LIKENESS_DECAY = 0.7
"""Weight of the old value in the moving average of the correlation between sequence lengths in the same unit."""

MAX_LIKENESS = 0.95
"""Maximum value of the estimated correlation between the log lengths of sequences in the same unit."""

PRIOR_DRIFT = 0.2
"""Assumed change in the logarithm of the mean length between two stages, which is used until two stages have been
measured."""

DRIFT_DECAY = 0.7
"""Weight of the old value in the moving average of the squared change in the logarithm of the mean length."""

MAX_DRIFT = 1.0
"""Maximum standard deviation of the logarithm of the mean length in predictions."""

MAX_MOVES = 64
"""Number of most recent worker moves from which the 95th percentile of the move time is computed."""


class UnitObservation(Settings):
    """Measurements of one finished work unit, read from its manifest. The sums over decoding steps are 0 if the engine
    does not count its steps."""

    role: Role
    """Role of the worker that processed the unit: rollout or scoring."""
    sequences: int
    """Number of decoded sequences. Each vote and each repeated attempt of a judge model is a separate sequence."""
    seconds: float
    """Seconds from the start of the unit on a worker to its commit. The time to load weights is not included, because
    it is part of the time of a move."""
    steps: float = 0.0
    """Number of decoding steps."""
    step_sequences: float = 0.0
    """Sum of the batch sizes of all steps."""
    step_sequences_squared: float = 0.0
    """Sum of the squared batch sizes of all steps."""
    step_seconds: float = 0.0
    """Sum of the times of all steps, in seconds."""
    step_sequence_seconds: float = 0.0
    """Sum of batch size × time (seconds) of all steps."""
    lengths: tuple[float, ...] = ()
    """Sequence lengths in tokens at evenly spaced quantiles, including the shortest and the longest."""


class Prior(Settings):
    """Assumed lengths and speed of a role, which are used until the role is measured for the first time."""

    median_tokens: float = 128.0
    """Median sequence length in tokens."""
    sigma: float = 0.8
    """Standard deviation of the logarithm of the length. Lengths are assumed to be log-normal."""
    max_tokens: float = 4096.0
    """Maximum sequence length in tokens."""
    pace: Pace = Pace(base_seconds=0.02, per_sequence_seconds=0.0005)
    """Assumed speed of a worker."""

    def lengths(self) -> tuple[float, ...]:
        """Return the assumed lengths in tokens at 64 evenly spaced quantiles."""
        normals = normal_quantile((np.arange(64) + 0.5) / 64)
        lengths = np.minimum(self.median_tokens * np.exp(self.sigma * normals), self.max_tokens)
        return tuple(float(length) for length in lengths)


class RoleMeasurements(Settings):
    """Measurements of one role, accumulated over the finished stages."""

    stages: int = 0
    """Number of stages that were measured."""
    steps: LineSums = LineSums()
    """Sums for fitting the time of a decoding step as a line over the batch size."""
    rest: LineSums = LineSums()
    """Sums for fitting the time of a unit without its decoding steps as a line over its number of sequences."""
    lengths: tuple[float, ...] = ()
    """Sorted sample of recent sequence lengths in tokens. At least half of them are from the last stage."""
    likeness: float = 0.0
    """Moving average of the correlation between the log lengths of two sequences in the same unit."""
    mean_length: float = 0.0
    """Mean sequence length in the last stage, in tokens."""
    drift: float = PRIOR_DRIFT
    """Typical change (root mean square) of the logarithm of the mean length from one stage to the next, as a moving
    average. Before the second stage this is the assumed value `PRIOR_DRIFT`."""
    busy_seconds: float = 0.0
    """Moving average of the worker-seconds that the role was busy per stage."""


class Measurements(Settings):
    """Measurements of rollout, of scoring, and of moves of workers between these roles, accumulated over finished
    stages."""

    rollout: RoleMeasurements = RoleMeasurements()
    """Measurements of rollout units."""
    scoring: RoleMeasurements = RoleMeasurements()
    """Measurements of scoring units."""
    moves: tuple[float, ...] = ()
    """Seconds that each recent move of a worker took, oldest first."""
    move_seconds: float | None = None
    """Moving average of the seconds that a move takes. None before the first move."""

    def observe(self, units: Iterable[UnitObservation], *, moves: Iterable[float] = ()) -> "Measurements":
        """Return new measurements that also include another finished stage.

        `units` must contain all units of the stage. Units that finish first tend to be short, so measuring only some
        units would bias the result. `moves` contains the seconds of each move of a worker in the stage, from the
        decision until the worker starts work in its new role.
        """
        observed, moves = tuple(units), tuple(moves)
        average = self.move_seconds
        for seconds in moves:
            average = seconds if average is None else RESIZE_DECAY * average + (1 - RESIZE_DECAY) * seconds
        return Measurements(
            rollout=_observe(self.rollout, [unit for unit in observed if unit.role == "rollout"]),
            scoring=_observe(self.scoring, [unit for unit in observed if unit.role == "scoring"]),
            moves=(*self.moves, *moves)[-MAX_MOVES:],
            move_seconds=average,
        )

    def resize(self) -> ResizeCost:
        """Return the measured time of moving a worker, or an assumed time if no worker has been moved yet."""
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
        min_slots: int = 1,
        units_at_once: int = 1,
        prior: Prior | None = None,
    ) -> Demand:
        """Return the expected work of the role in a stage of `units` units with `sequences` sequences each."""
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
            least_slots=min_slots,
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
        steps=known.steps.add(_total(_steps(unit) for unit in units), decay=STEP_DECAY),
        rest=known.rest.add(_total(_rest(unit) for unit in units), decay=STEP_DECAY),
        lengths=_merge_lengths(known.lengths, lengths, seed=known.stages),
        likeness=_likeness(lengths, known),
        mean_length=mean,
        drift=_drift(mean, known),
        busy_seconds=BUSY_DECAY * known.busy_seconds + (1 - BUSY_DECAY) * busy if known.stages else busy,
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
        total = total.add(part)
    return total


def _expand_lengths(unit: UnitObservation) -> Floats:
    """Return a length in tokens for each sequence of a unit, by interpolating the lengths at the recorded quantiles."""
    return np.interp(np.linspace(0, 1, max(unit.sequences, 1)), np.linspace(0, 1, len(unit.lengths)), unit.lengths)


def _merge_lengths(old: tuple[float, ...], lengths: list[Floats], *, seed: int) -> tuple[float, ...]:
    """Return a sorted sample of at most `MAX_LENGTHS` lengths. At most half of the sample consists of old lengths."""
    if not lengths:
        return old
    rng = np.random.default_rng(seed)
    new, past = np.concatenate(lengths), np.asarray(old)
    past = _thin(past, min(past.size, new.size, MAX_LENGTHS // 2), rng)
    new = _thin(new, min(new.size, MAX_LENGTHS - past.size), rng)
    return tuple(float(length) for length in np.sort(np.concatenate([past, new])))


def _thin(lengths: Floats, count: int, rng: np.random.Generator) -> Floats:
    """Divide the sorted lengths into `count` equal slices, and return a random length from each slice.

    In contrast to plain random sampling, short and long lengths are always represented.
    """
    at = (np.arange(count) + rng.random(count)) * lengths.size / max(count, 1)
    return np.asarray(np.sort(lengths)[np.minimum(at.astype(np.int64), max(lengths.size - 1, 0))])


def _drift(mean: float, known: RoleMeasurements) -> float:
    if not (known.mean_length and mean):
        return known.drift
    return sqrt(DRIFT_DECAY * known.drift**2 + (1 - DRIFT_DECAY) * log(mean / known.mean_length) ** 2)


def _likeness(lengths: list[Floats], known: RoleMeasurements) -> float:
    """Return the correlation between the log lengths of two sequences of the same unit. It is the intraclass
    correlation, computed from the variances within and between units (ANOVA)."""
    logs = [np.log(np.maximum(unit, 1.0)) for unit in lengths if unit.size > 1]
    if len(logs) < 3:
        return known.likeness
    size = float(np.mean([unit.size for unit in logs]))
    between = size * float(np.var([unit.mean() for unit in logs], ddof=1))
    within = float(np.mean([unit.var(ddof=1) for unit in logs]))
    total = between + (size - 1) * within
    correlation = min(max((between - within) / total, 0.0), MAX_LIKENESS) if total > 0 else 0.0
    return LIKENESS_DECAY * known.likeness + (1 - LIKENESS_DECAY) * correlation if known.stages else correlation
