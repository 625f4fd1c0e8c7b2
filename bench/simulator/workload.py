"""Random workloads for the simulator.

A workload is sampled once for each seed, so that all policies are compared with the same sequence lengths, slow workers
and failures. Lengths are heavy-tailed and correlated within a group. Scenarios change the median length from one
iteration to the next.

Shapes: U units, S sequences of a rollout unit, V verdicts (outputs of a judge model) of a unit (S × votes), N slots.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rheostat.infra.statistics import normal_cdf, normal_quantile
from rheostat.placement.records import Floats, Pace

RANGE = 8.0  # ratio of the largest to the smallest factor in every scenario with changes

PERIOD = 8  # period of the sinusoid in iterations; `flip` changes after half a period

BURST_SHARE = 0.25  # fraction of iterations with a burst of long sequences


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
"""Scenarios by name. Each function returns two arrays with a factor for each iteration: the factors of completion
lengths and those of verdict lengths."""

BIMODAL_LONG = 0.2  # fraction of completions of the long kind

BIMODAL_FACTOR = 8.0

BIMODAL_SIGMA = 0.25  # standard deviation of the log length within each kind


@dataclass(frozen=True, slots=True)
class Lengths:
    """Distribution of sequence lengths, relative to a median length of 1."""

    name: str
    """Name of the distribution."""
    shape: Literal["lognormal", "bimodal", "pareto"]
    """Family of the distribution."""
    parameter: float
    """Parameter of the distribution: sigma if log-normal, alpha if Pareto, and the ratio of long to short sequences'
    lengths if bimodal."""
    correlation: float = 0.3
    """Correlation between two completions of the same prompt. It applies to the normal variables from which the lengths
    are computed."""
    truncated: float = 0.02
    """Fraction of the sequences that are cut off at the maximum length."""


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
"""Distributions of sequence lengths by name."""


def sample_lengths(lengths: Lengths, rng: np.random.Generator, *, units: int, groups: int, group_size: int) -> Floats:
    """Return random lengths (U x S) with median 1, where S = groups * group_size. They are not rounded to tokens."""
    shared = rng.standard_normal((units, groups, 1))
    own = rng.standard_normal((units, groups, group_size))
    normal = np.sqrt(lengths.correlation) * shared + np.sqrt(1 - lengths.correlation) * own
    return np.minimum(_shaped(lengths, normal), max_length(lengths)).reshape(units, groups * group_size)


def max_length(lengths: Lengths) -> float:
    """Return the maximum length as a multiple of the median. The fraction `truncated` of all sequences would be
    longer."""
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
"""Speed of scoring workers. With this speed and that of rollout workers, both roles have about the same work on
average. Either role can become the bottleneck when the load changes."""


@dataclass(frozen=True, slots=True)
class JudgeLoad:
    """Work of a generative reward model (judge): the lengths of its verdicts, and the time to read a completion."""

    mean_tokens: float = 256.0
    """Mean number of tokens of a verdict."""
    sigma: float = 0.5
    """Standard deviation of the log length of a verdict."""
    votes: int = 1
    """Number of verdicts that are generated for each completion."""
    unparsable: float = 0.02
    """Fraction of the verdicts that cannot be parsed and are requested again."""
    prefill_seconds: float = 2e-6
    """Seconds for reading one token of a prompt or completion. Each completion is read once for all of its votes."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Rates at which workers fail or are slow. By default all rates are 0."""

    slow_share: float = 0.0
    """Fraction of the slots that are 3 to 10 times slower than the others during the whole run."""
    kills_per_hour: float = 0.0
    """Mean number of crashes per worker and hour. The units in progress are repeated, and the worker is available again
    after `restart_seconds`."""
    restart_seconds: float = 10.0
    """Seconds until a worker that died or was preempted is available again."""
    preemptions_per_hour: float = 0.0
    """Mean number of preemptions per worker and hour. When a worker is notified, it starts no more units. It stops
    after `notice_seconds`, and is available again after another `restart_seconds`."""
    notice_seconds: float = 30.0
    """Seconds between the notification of a preemption and the stop of the worker."""


@dataclass(frozen=True, slots=True)
class World:
    """Pool of workers and its load, from which random workloads are sampled. Times are in seconds, lengths in
    tokens."""

    workers: int
    """Number of worker slots."""
    scenario: str = "stationary"
    """Name of the scenario, which determines how sequence lengths change from iteration to iteration."""
    lengths: Lengths = KNOWN["lognormal-0.8"]
    """Distribution of completion lengths."""
    units_per_worker: float = 6.0
    """Mean number of work units per worker in an iteration."""
    groups_per_unit: int = 4
    """Number of groups (prompts) in a unit."""
    group_size: int = 8
    """Number of completions in a group."""
    units_at_once: int = 1
    """Number of units that one worker decodes together (continuous batching). With 1, units are decoded one after
    another."""
    median_tokens: float = 400.0
    """Median length of a completion in tokens."""
    prompt_tokens: float = 256.0
    """Length of a prompt in tokens."""
    rollout: Pace = ROLLOUT
    """Speed of a rollout worker."""
    scoring: Pace = SCORING
    """Speed of a scoring worker."""
    judge: JudgeLoad = JudgeLoad()
    """Work of the generative reward model (judge)."""
    faults: Faults = Faults()
    """Rates of worker failures."""
    iterations: int = 12
    """Number of iterations."""

    @property
    def units(self) -> int:
        """Number of work units in an iteration."""
        return max(1, round(self.workers * self.units_per_worker))


@dataclass(frozen=True, slots=True)
class RoleWork:
    """Work units of one role in one iteration."""

    pace: Pace
    """Speed of a worker."""
    lengths_US: Floats
    """Length of each sequence in each unit, in tokens."""
    setup_U: Floats
    """Seconds that each unit takes before its first token, including the constant time per unit."""
    seconds_U: Floats
    """Seconds that each unit takes if it is decoded alone on a worker of normal speed."""


@dataclass(frozen=True, slots=True)
class StageWork:
    """Work of both roles in one iteration. Scoring unit u can start when rollout unit u is done."""

    rollout: RoleWork
    """Lengths and times of the rollout units."""
    scoring: RoleWork
    """Lengths and times of the scoring units."""
    units_at_once: int
    """Number of units that one worker decodes together."""


@dataclass(frozen=True, slots=True)
class Absence:
    """Period in which a worker is not available. The worker starts no more units after `notice`, stops at `until`, and
    is available again at `back`."""

    slot: int
    """Index of the worker's slot."""
    notice: float
    """Time after which the worker starts no more units, in seconds after the start of the iteration."""
    until: float
    """Time at which the worker stops. Its units in progress are lost."""
    back: float
    """Time at which the worker is available again."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Work and worker failures in all iterations, sampled with one random seed."""

    stages: tuple[StageWork, ...]
    """Work of each iteration."""
    slowness_N: Floats
    """Factor by which all times on each slot are multiplied. 1 means normal speed."""
    absences: tuple[tuple[Absence, ...], ...]
    """Absences of workers in each iteration, ordered by `notice`. Times are in seconds after the start of the
    iteration."""

    @property
    def workers(self) -> int:
        """Number of slots."""
        return len(self.slowness_N)

    @property
    def simple(self) -> bool:
        """Whether times can be computed without simulating events, because each worker decodes one unit at a time and
        no worker fails."""
        return all(stage.units_at_once == 1 for stage in self.stages) and not any(self.absences)

    @property
    def tail(self) -> float:
        """Mean ratio of the time to generate the longest completion and the time of all rollout work at full
        throughput.

        The ratio of an iteration is A · max ℓ / (Σ ℓ · (C + A / batch) / N), with lengths ℓ and the constants A and C
        of `Pace`. Above 1, the longest completion determines the time of the stage.
        """
        return float(np.mean([_tail(stage, self.workers) for stage in self.stages]))


def _tail(stage: StageWork, workers: int) -> float:
    role, batch = stage.rollout, stage.rollout.lengths_US.shape[1] * stage.units_at_once
    longest = role.pace.base_seconds * float(role.lengths_US.max())
    shared = role.pace.per_sequence_seconds + role.pace.base_seconds / batch
    return float(longest / (role.lengths_US.sum() * shared / workers))


def role_work(pace: Pace, lengths_US: Floats, *, setup_U: Floats | None = None) -> RoleWork:
    """Return the work of a role whose units have the given sequence lengths. Lengths are rounded up to whole tokens.

    A decoding step takes A + C · (unfinished sequences) seconds, with the constants of `Pace`. Therefore a unit with
    lengths ℓ that is decoded alone takes A · max ℓ + C · Σ ℓ seconds after its setup.
    """
    lengths_US = np.ceil(np.maximum(lengths_US, 1))
    if setup_U is None:
        setup_U = np.full(lengths_US.shape[0], pace.unit_seconds + pace.setup_seconds * lengths_US.shape[1])
    decoding_U = pace.base_seconds * lengths_US.max(axis=1) + pace.per_sequence_seconds * lengths_US.sum(axis=1)
    return RoleWork(pace=pace, lengths_US=lengths_US, setup_U=setup_U, seconds_U=setup_U + decoding_U)


def sample_workload(world: World, seed: int) -> Workload:
    """Sample the work and the failures in all iterations. Workloads with different seeds are independent."""
    kinds = np.random.SeedSequence(seed).spawn(3 + world.iterations)
    rollout_factors, scoring_factors = SCENARIOS[world.scenario](world.iterations, np.random.default_rng(kinds[0]))
    stages = tuple(
        _draw_stage(world, np.random.default_rng(kind), float(rollout), float(scoring))
        for kind, rollout, scoring in zip(kinds[3:], rollout_factors, scoring_factors, strict=True)
    )
    rng = np.random.default_rng(kinds[1])
    slow_N = rng.random(world.workers) < world.faults.slow_share
    slowness_N = np.where(slow_N, rng.uniform(3, 10, world.workers), 1.0)
    absences = _absences(world, stages, np.random.default_rng(kinds[2]))
    return Workload(stages=stages, slowness_N=slowness_N, absences=absences)


def _draw_stage(world: World, rng: np.random.Generator, rollout_factor: float, scoring_factor: float) -> StageWork:
    lengths_US = sample_lengths(
        world.lengths, rng, units=world.units, groups=world.groups_per_unit, group_size=world.group_size
    )
    rollout = role_work(world.rollout, lengths_US * world.median_tokens * rollout_factor)
    judge, sequences = world.judge, lengths_US.shape[1] * world.judge.votes
    # `mean_tokens` is the mean. The median of a log-normal is lower by the factor exp(sigma²/2).
    scale = judge.mean_tokens * scoring_factor * np.exp(-(judge.sigma**2) / 2)
    verdicts_2UV = np.ceil(scale * np.exp(judge.sigma * rng.standard_normal((2, world.units, sequences))))
    again_UV = rng.random((world.units, sequences)) < judge.unparsable
    read_U = (world.prompt_tokens + rollout.lengths_US).sum(axis=1)
    pace = world.scoring
    setup_U = pace.unit_seconds + judge.prefill_seconds * read_U
    setup_U = setup_U + pace.setup_seconds * (sequences + again_UV.sum(axis=1))
    # A repeated verdict is decoded after the first one, in the same place of the batch.
    scoring = role_work(pace, verdicts_2UV[0] + again_UV * verdicts_2UV[1], setup_U=setup_U)
    return StageWork(rollout=rollout, scoring=scoring, units_at_once=world.units_at_once)


def _absences(world: World, stages: Sequence[StageWork], rng: np.random.Generator) -> tuple[tuple[Absence, ...], ...]:
    """Sample crashes and preemptions for each iteration, within a period of ten times its expected duration."""
    faults = world.faults
    by_iteration = []
    for stage in stages:
        horizon = 10 * float(stage.rollout.seconds_U.sum() + stage.scoring.seconds_U.sum()) / world.workers
        absences = [
            *_arrivals(rng, faults.kills_per_hour, horizon, world.workers, notice=0.0, away=faults.restart_seconds),
            *_arrivals(
                rng,
                faults.preemptions_per_hour,
                horizon,
                world.workers,
                notice=faults.notice_seconds,
                away=faults.restart_seconds,
            ),
        ]
        by_iteration.append(tuple(sorted(absences, key=lambda absence: absence.notice)))
    return tuple(by_iteration)


def _arrivals(
    rng: np.random.Generator, per_hour: float, horizon: float, workers: int, *, notice: float, away: float
) -> list[Absence]:
    count = int(rng.poisson(per_hour / 3600 * horizon * workers))
    return [
        Absence(slot=int(slot), notice=float(at), until=float(at) + notice, back=float(at) + notice + away)
        for at, slot in zip(rng.uniform(0, horizon, count), rng.integers(0, workers, count), strict=True)
    ]
