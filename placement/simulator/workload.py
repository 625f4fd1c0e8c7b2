"""What there is to do, drawn once per seed: every policy meets the same answers, slow workers and deaths.

Lengths are heavy-tailed and alike within a group; scenarios move their median from one iteration to the next.

Suffixes: U units, S sequences of a rollout unit, V verdicts asked of a unit (S × votes), N slots.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from infra.statistics import normal_cdf, normal_quantile
from placement.records import Floats, Pace

RANGE = 8.0  # from the smallest to the largest factor of every scenario that moves

PERIOD = 8  # iterations of one wave of the sinusoid, and between two flips

BURST_SHARE = 0.25  # iterations that burst


def _stationary(iterations: int, _: np.random.Generator) -> tuple[Floats, Floats]:
    return np.ones(iterations), np.ones(iterations)


def _drift(iterations: int, _: np.random.Generator) -> tuple[Floats, Floats]:
    return RANGE ** np.linspace(-0.5, 0.5, iterations), np.ones(iterations)


def _step(iterations: int, _: np.random.Generator) -> tuple[Floats, Floats]:
    late = np.arange(iterations) >= iterations / 2
    return np.where(late, RANGE**0.5, RANGE**-0.5), np.ones(iterations)


def _sinusoid(iterations: int, _: np.random.Generator) -> tuple[Floats, Floats]:
    return RANGE ** (0.5 * np.sin(2 * np.pi * np.arange(iterations) / PERIOD)), np.ones(iterations)


def _flip(iterations: int, _: np.random.Generator) -> tuple[Floats, Floats]:
    late = np.arange(iterations) // (PERIOD // 2) % 2 == 1
    return np.where(late, RANGE**0.25, RANGE**-0.25), np.where(late, RANGE**-0.25, RANGE**0.25)


def _burst(iterations: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    bursts = np.zeros(iterations, bool)
    bursts[rng.choice(iterations, max(1, round(BURST_SHARE * iterations)), replace=False)] = True
    return np.where(bursts, RANGE, 1.0), np.ones(iterations)


SCENARIOS: dict[str, Callable[[int, np.random.Generator], tuple[Floats, Floats]]] = {
    "stationary": _stationary,
    "drift": _drift,
    "step": _step,
    "sinusoid": _sinusoid,
    "flip": _flip,
    "burst": _burst,
}
"""By name; each gives the factors of all iterations, of rollouts and of verdicts."""

BIMODAL_LONG = 0.2  # share of answers of the long kind

BIMODAL_FACTOR = 8.0

BIMODAL_SIGMA = 0.25  # spread within a kind, in log space


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens with median 1, to be scaled."""

    name: str
    shape: Literal["lognormal", "bimodal", "pareto"]
    parameter: float
    """Sigma of the log-normal, alpha of Pareto's, factor between the two kinds of a bimodal one."""
    correlation: float = 0.3
    """Of two answers to one prompt, in the normal variable behind the length."""
    truncated: float = 0.02
    """Share of the mass at the cap."""


KNOWN = {
    known.name: known
    for known in (
        *(Lengths(f"lognormal-{sigma}", "lognormal", sigma) for sigma in (0.5, 0.8, 1.0, 1.2)),
        Lengths("lognormal-1.0-cut", "lognormal", 1.0, truncated=0.1),
        Lengths("lognormal-0.8-alone", "lognormal", 0.8, correlation=0.0),
        Lengths("lognormal-0.8-alike", "lognormal", 0.8, correlation=0.7),
        Lengths("bimodal", "bimodal", BIMODAL_FACTOR),
        Lengths("pareto-1.5", "pareto", 1.5, truncated=0.01),
        Lengths("pareto-2.5", "pareto", 2.5, truncated=0.01),
    )
}
"""The distributions that the aims speak of, by name."""


def draw(lengths: Lengths, rng: np.random.Generator, *, units: int, groups: int, group_size: int) -> Floats:
    """Lengths [U, S] with S = groups * group_size and median 1, before rounding to tokens."""
    shared = rng.standard_normal((units, groups, 1))
    own = rng.standard_normal((units, groups, group_size))
    normal = np.sqrt(lengths.correlation) * shared + np.sqrt(1 - lengths.correlation) * own
    return np.minimum(_shaped(lengths, normal), cap(lengths)).reshape(units, groups * group_size)


def cap(lengths: Lengths) -> float:
    """The longest length, in medians: the quantile above which the truncated mass lies."""
    z = normal_quantile(1 - lengths.truncated)
    match lengths.shape:
        case "lognormal":
            return float(np.exp(lengths.parameter * z))
        case "pareto":
            return float((2 * lengths.truncated) ** (-1 / lengths.parameter))
        case "bimodal":
            return float(lengths.parameter * np.exp(BIMODAL_SIGMA * z))


def _shaped(lengths: Lengths, normal: Floats) -> Floats:
    match lengths.shape:
        case "lognormal":
            return np.asarray(np.exp(lengths.parameter * normal))
        case "pareto":
            above = np.maximum(1 - normal_cdf(normal), 1e-12)
            return np.asarray((2 * above) ** (-1 / lengths.parameter))
        case "bimodal":
            long = normal > normal_quantile(1 - BIMODAL_LONG)
            return np.asarray(np.where(long, lengths.parameter, 1.0) * np.exp(BIMODAL_SIGMA * normal))


ROLLOUT = Pace(base_seconds=0.005, per_sequence_seconds=0.0002, setup_seconds=0.002, unit_seconds=0.1)

SCORING = Pace(base_seconds=0.009, per_sequence_seconds=0.0004, setup_seconds=0.002, unit_seconds=0.1)
"""Paces with which both roles have about the same work on average, so that a load that moves tips either way."""


@dataclass(frozen=True, slots=True)
class JudgeLoad:
    """A generative reward model: what it writes, and what reading costs it."""

    mean_tokens: float = 256.0
    sigma: float = 0.5
    votes: int = 1
    unparsable: float = 0.02
    """Share of verdicts that are asked for once more."""
    prefill_seconds: float = 2e-6
    """Per token of prompt and completion, once per completion: its votes share what was read."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """What goes wrong with workers; none by default."""

    slow_share: float = 0.0
    """Share of slots that are slow for the whole run, by a factor of 3 to 10."""
    kills_per_hour: float = 0.0
    """Deaths per worker and hour; the units under way are done again, the worker is back after `restart_seconds`."""
    restart_seconds: float = 10.0
    preemptions_per_hour: float = 0.0
    """Per worker and hour: a notice, after which no unit is begun; the worker goes `notice_seconds` later, and is back
    after `restart_seconds`."""
    notice_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class World:
    """A pool and its load: one cell of the evaluation. Times in seconds, lengths in tokens."""

    workers: int
    scenario: str = "stationary"
    lengths: Lengths = KNOWN["lognormal-0.8"]
    units_per_worker: float = 6.0
    groups_per_unit: int = 4
    group_size: int = 8
    units_at_once: int = 1
    """Units that one worker decodes together, by continuous batching; 1: whole units, one after another."""
    median_tokens: float = 400.0
    prompt_tokens: float = 256.0
    rollout: Pace = ROLLOUT
    scoring: Pace = SCORING
    judge: JudgeLoad = JudgeLoad()
    trouble: Trouble = Trouble()
    iterations: int = 12

    @property
    def units(self) -> int:
        """Units of an iteration."""
        return max(1, round(self.workers * self.units_per_worker))


@dataclass(frozen=True, slots=True)
class RoleWork:
    """What one role has to do in one iteration."""

    pace: Pace
    lengths_US: Floats
    setup_U: Floats
    """Seconds per unit before its first token, those of the unit itself included."""
    seconds_U: Floats
    """Seconds per unit that is decoded alone on a worker of ordinary speed."""


@dataclass(frozen=True, slots=True)
class StageWork:
    """One iteration: unit u is scored when unit u is generated."""

    rollout: RoleWork
    scoring: RoleWork
    units_at_once: int


@dataclass(frozen=True, slots=True)
class Absence:
    """A worker that goes: from `until` it works no more, after `notice` it begins nothing, at `back` it is there."""

    slot: int
    notice: float
    until: float
    back: float


@dataclass(frozen=True, slots=True)
class Workload:
    """All iterations of one seed."""

    stages: tuple[StageWork, ...]
    slowness_N: Floats
    """Factor of all times of a slot; 1 is ordinary."""
    absences: tuple[tuple[Absence, ...], ...]
    """Per iteration, by `notice`, in seconds after its begin."""

    @property
    def workers(self) -> int:
        """Slots."""
        return len(self.slowness_N)

    @property
    def simple(self) -> bool:
        """Whether makespans follow without an event loop: whole units, nobody goes."""
        return all(stage.units_at_once == 1 for stage in self.stages) and not any(self.absences)

    @property
    def tail(self) -> float:
        """max ℓ · A over Σ ℓ · (C + A / batch) / N, for rollout, on average: above 1 the longest answer decides."""
        return float(np.mean([_tail(stage, self.workers) for stage in self.stages]))


def _tail(stage: StageWork, workers: int) -> float:
    role, batch = stage.rollout, stage.rollout.lengths_US.shape[1] * stage.units_at_once
    longest = role.pace.base_seconds * float(role.lengths_US.max())
    shared = role.pace.per_sequence_seconds + role.pace.base_seconds / batch
    return float(longest / (role.lengths_US.sum() * shared / workers))


def role_work(pace: Pace, lengths_US: Floats, *, setup_U: Floats | None = None) -> RoleWork:
    """A role's work in units of the given lengths, which are rounded up to whole tokens.

    A unit that is decoded alone takes A · max ℓ + C · Σ ℓ beside its setup: each step costs A + C · (sequences left).
    """
    lengths_US = np.ceil(np.maximum(lengths_US, 1))
    if setup_U is None:
        setup_U = np.full(lengths_US.shape[0], pace.unit_seconds + pace.setup_seconds * lengths_US.shape[1])
    decoding_U = pace.base_seconds * lengths_US.max(axis=1) + pace.per_sequence_seconds * lengths_US.sum(axis=1)
    return RoleWork(pace=pace, lengths_US=lengths_US, setup_U=setup_U, seconds_U=setup_U + decoding_U)


def draw_workload(world: World, seed: int) -> Workload:
    """Draw what happens in every iteration of a world; two seeds have nothing in common."""
    kinds = np.random.SeedSequence(seed).spawn(3 + world.iterations)
    rollout_factors, scoring_factors = SCENARIOS[world.scenario](world.iterations, np.random.default_rng(kinds[0]))
    stages = tuple(
        _draw_stage(world, np.random.default_rng(kind), float(rollout), float(scoring))
        for kind, rollout, scoring in zip(kinds[3:], rollout_factors, scoring_factors, strict=True)
    )
    rng = np.random.default_rng(kinds[1])
    slow_N = rng.random(world.workers) < world.trouble.slow_share
    slowness_N = np.where(slow_N, rng.uniform(3, 10, world.workers), 1.0)
    absences = _absences(world, stages, np.random.default_rng(kinds[2]))
    return Workload(stages=stages, slowness_N=slowness_N, absences=absences)


def _draw_stage(world: World, rng: np.random.Generator, rollout_factor: float, scoring_factor: float) -> StageWork:
    lengths_US = draw(world.lengths, rng, units=world.units, groups=world.groups_per_unit, group_size=world.group_size)
    rollout = role_work(world.rollout, lengths_US * world.median_tokens * rollout_factor)
    judge, sequences = world.judge, lengths_US.shape[1] * world.judge.votes
    # Of this mean: the median of a log-normal lies exp(sigma²/2) below it.
    scale = judge.mean_tokens * scoring_factor * np.exp(-(judge.sigma**2) / 2)
    verdicts_2UV = np.ceil(scale * np.exp(judge.sigma * rng.standard_normal((2, world.units, sequences))))
    again_UV = rng.random((world.units, sequences)) < judge.unparsable
    read_U = (world.prompt_tokens + rollout.lengths_US).sum(axis=1)
    pace = world.scoring
    setup_U = pace.unit_seconds + judge.prefill_seconds * read_U
    setup_U = setup_U + pace.setup_seconds * (sequences + again_UV.sum(axis=1))
    # A second try follows the first one in its place in the batch.
    scoring = role_work(pace, verdicts_2UV[0] + again_UV * verdicts_2UV[1], setup_U=setup_U)
    return StageWork(rollout=rollout, scoring=scoring, units_at_once=world.units_at_once)


def _absences(world: World, stages: Sequence[StageWork], rng: np.random.Generator) -> tuple[tuple[Absence, ...], ...]:
    """Deaths and preemptions of each iteration, over ten times as long as the iteration's work would take evenly."""
    trouble = world.trouble
    found = []
    for stage in stages:
        horizon = 10 * float(stage.rollout.seconds_U.sum() + stage.scoring.seconds_U.sum()) / world.workers
        absences = [
            *_arrivals(rng, trouble.kills_per_hour, horizon, world.workers, notice=0.0, away=trouble.restart_seconds),
            *_arrivals(
                rng,
                trouble.preemptions_per_hour,
                horizon,
                world.workers,
                notice=trouble.notice_seconds,
                away=trouble.restart_seconds,
            ),
        ]
        found.append(tuple(sorted(absences, key=lambda absence: absence.notice)))
    return tuple(found)


def _arrivals(
    rng: np.random.Generator, per_hour: float, horizon: float, workers: int, *, notice: float, away: float
) -> list[Absence]:
    count = int(rng.poisson(per_hour / 3600 * horizon * workers))
    return [
        Absence(slot=int(slot), notice=float(at), until=float(at) + notice, back=float(at) + notice + away)
        for at, slot in zip(rng.uniform(0, horizon, count), rng.integers(0, workers, count), strict=True)
    ]
