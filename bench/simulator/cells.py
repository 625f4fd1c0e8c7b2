"""Evaluation of placement policies in cells, with the same random seeds for all policies.

A cell is a combination of a pool size, a load and the time that moving a worker takes. The load is synthetic, or
resampled from the measurements of a real run. In each cell, the results of the adaptive policy are compared with its
aims (bounds on ratios of times). Ratios are computed for each seed, and have intervals from Student's t distribution.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from statistics import fmean, stdev
from typing import Literal

import numpy as np
from scipy.special import stdtrit

from bench.simulator.baselines import (
    Periodic,
    co_resident_run,
    colocated_run,
    hindsight,
    lower_bound_run,
    split_run,
)
from bench.simulator.runs import simulate_run
from bench.simulator.workload import (
    KNOWN,
    Faults,
    JudgeLoad,
    RoleWork,
    StageWork,
    Workload,
    World,
    role_work,
    sample_workload,
)
from rheostat.placement.config import AdaptivePlacement, ProportionalPlacement
from rheostat.placement.policies.build import build_policy
from rheostat.placement.records import Demand, Policy

REGIMES: dict[str, World] = {
    "throughput": World(workers=0),
    "tail": World(workers=0, units_per_worker=1.0, lengths=KNOWN["lognormal-1.2"]),
    "batched": World(workers=0, units_per_worker=24.0, groups_per_unit=1, units_at_once=8),
    "votes-4": World(workers=0, judge=JudgeLoad(mean_tokens=128.0, votes=4)),
    "votes-8": World(workers=0, judge=JudgeLoad(mean_tokens=128.0, votes=8)),
    "long-verdicts": World(workers=0, judge=JudgeLoad(mean_tokens=2048.0, unparsable=0.03)),
    "troubled": World(
        workers=0, faults=Faults(slow_share=0.02, kills_per_hour=1.0, preemptions_per_hour=1.0, notice_seconds=10.0)
    ),
}
"""Kinds of load by name: many units, few long units, continuous batching, slower judges, and unreliable workers."""

DECIDING_POLICIES: dict[str, Callable[[], Policy]] = {
    "proportional": lambda: build_policy(ProportionalPlacement()),
    "periodic": Periodic,
    "adaptive": lambda: build_policy(AdaptivePlacement()),
}
"""Placement policies that make decisions during the simulation. Real runs use the same classes."""

FIXED = {"fixed_25": 0.25, "fixed_50": 0.5, "fixed_75": 0.75}
"""Fraction of the slots that run rollout in each fixed split, by name of the split."""

POLICIES = (
    "lower_bound",
    "clairvoyant",
    "co_resident",
    "colocated",
    *FIXED,
    "fixed_hindsight",
    *DECIDING_POLICIES,
)
"""Names of all policies and baselines that are compared."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Conditions under which all policies are compared."""

    regime: str
    """Name of the kind of load, a key of `REGIMES`."""
    workers: int
    """Number of worker slots."""
    scenario: str
    """Name of the scenario, which determines how sequence lengths change from iteration to iteration."""
    lengths: str
    """Name of the distribution of sequence lengths."""
    resize_seconds: float
    """Seconds that it takes to move a worker to the other role."""

    def __str__(self) -> str:
        return f"{self.regime}, N={self.workers}, {self.scenario}, {self.lengths}, S={self.resize_seconds:g} s"


@dataclass(frozen=True, slots=True)
class CellResult:
    """Results of all policies in one cell (pool size, load and time of a move). Tuples have one entry for each seed."""

    cell: Cell
    """Conditions under which the policies were compared."""
    iterations: int
    """Number of iterations of each workload."""
    seconds: dict[str, tuple[float, ...]]
    """Total seconds of all iterations, by policy."""
    moves: tuple[float, ...]
    """Mean number of moves per worker and iteration under the adaptive policy. Handovers are not included."""
    handovers: tuple[float, ...]
    """Mean number of handovers per worker and iteration under the adaptive policy. A handover moves a rollout worker to
    scoring because there are no more rollout units."""
    turns: tuple[float, ...]
    """Fraction of the iterations in which the adaptive policy chose to take turns."""
    slowest_decision: float
    """Seconds that the slowest decision of any policy took."""
    tail: float
    """Time to generate the longest completion, relative to the time of all rollout work at full throughput."""


@dataclass(frozen=True, slots=True)
class Load:
    """Random workloads for several cells that differ only in the time of moving a worker."""

    cells: tuple[Cell, ...]
    """Simulated conditions. A cell combines a number of workers, a distribution of lengths, and so on."""
    sample: Callable[[int], Workload]
    """Function that returns a random workload for a given seed."""


def load_of(
    regime: str,
    *,
    workers: int,
    scenario: str,
    resize_seconds: Sequence[float],
    lengths: str | None = None,
    iterations: int | None = None,
) -> Load:
    """Return a load with these conditions. By default, lengths and iterations are those of the regime."""
    world = replace(REGIMES[regime], workers=workers, scenario=scenario)
    if lengths is not None:
        world = replace(world, lengths=KNOWN[lengths])
    if iterations is not None:
        world = replace(world, iterations=iterations)
    cells = tuple(Cell(regime, workers, scenario, world.lengths.name, seconds) for seconds in resize_seconds)
    return Load(cells=cells, sample=partial(sample_workload, world))


def evaluate_cell(
    load: Load,
    *,
    seeds: int,
    policies: Sequence[str] = POLICIES,
    clock: Callable[[], float],
    report: Callable[[str], None] = lambda _: None,
) -> list[CellResult]:
    """Run every policy on the same workloads, and return one result for each cell of the load.

    `clock` returns the current time in seconds, and is used to time the decisions of policies. `report` is called with
    a progress message before each seed.
    """
    trials: list[list[_Trial]] = [[] for _ in load.cells]
    for seed in range(seeds):
        report(f"{load.cells[0]}: seed {seed + 1} of {seeds}")
        workload = load.sample(seed)
        still = _run_static_baselines(workload, policies)
        for cell, cell_trials in zip(load.cells, trials, strict=True):
            cell_trials.append(_trial(workload, still, cell.resize_seconds, policies=policies, clock=clock))
    return [_result(cell, cell_trials) for cell, cell_trials in zip(load.cells, trials, strict=True)]


@dataclass(frozen=True, slots=True)
class _Trial:
    iterations: int
    seconds: dict[str, float]
    moves: float
    handovers: float
    turns: float
    slowest: float
    tail: float


def _run_static_baselines(workload: Workload, policies: Sequence[str]) -> dict[str, float]:
    """Return the total seconds of each baseline that never moves workers, by name of the baseline."""
    workers = workload.workers
    seconds_by_name = {}
    if "lower_bound" in policies:
        seconds_by_name["lower_bound"] = sum(lower_bound_run(workload))
    if "co_resident" in policies and workload.simple:
        seconds_by_name["co_resident"] = sum(co_resident_run(workload))
    if {"clairvoyant", "fixed_hindsight"} & set(policies):
        tried = hindsight(workload)
        seconds_by_name["clairvoyant"], seconds_by_name["fixed_hindsight"] = (
            sum(tried.best_each()),
            sum(tried.best_fixed()),
        )
    for name, share in FIXED.items():
        if name in policies:
            seconds_by_name[name] = sum(split_run(workload, min(max(round(workers * share), 1), workers - 1)))
    return {name: seconds for name, seconds in seconds_by_name.items() if name in policies}


def _trial(
    workload: Workload,
    still: dict[str, float],
    resize_seconds: float,
    *,
    policies: Sequence[str],
    clock: Callable[[], float],
) -> _Trial:
    seconds = dict(still)
    if "colocated" in policies:
        seconds["colocated"] = sum(colocated_run(workload, resize_seconds))
    moves, handovers, turns, slowest = 0.0, 0.0, 0.0, 0.0
    for name, make in DECIDING_POLICIES.items():
        if name not in policies:
            continue
        played = simulate_run(make(), workload, resize_seconds=resize_seconds, clock=clock)
        seconds[name] = sum(played.seconds)
        slowest = max(slowest, played.slowest_decision)
        if name == "adaptive":
            moves = sum(played.moves) / len(played.moves) / workload.workers
            handovers = sum(played.handovers) / len(played.moves) / workload.workers
            turns = sum(plan.mode == "colocated" for plan in played.plans) / len(played.plans)
    ordered = {name: seconds[name] for name in POLICIES if name in seconds}
    return _Trial(
        len(workload.stages),
        ordered,
        moves=moves,
        handovers=handovers,
        turns=turns,
        slowest=slowest,
        tail=workload.tail,
    )


def _result(cell: Cell, trials: list[_Trial]) -> CellResult:
    return CellResult(
        cell=cell,
        iterations=trials[0].iterations,
        seconds={name: tuple(trial.seconds[name] for trial in trials) for name in trials[0].seconds},
        moves=tuple(trial.moves for trial in trials),
        handovers=tuple(trial.handovers for trial in trials),
        turns=tuple(trial.turns for trial in trials),
        slowest_decision=max(trial.slowest for trial in trials),
        tail=sum(trial.tail for trial in trials) / len(trials),
    )


def recorded_load(
    run: str, stages: Sequence[tuple[Demand, Demand]], *, workers: int, resize_seconds: Sequence[float]
) -> Load:
    """Return a load from the measurements of a run, given as a pair (rollout, scoring) for each iteration."""
    cells = tuple(Cell(f"run {run}", workers, "as recorded", "measured", seconds) for seconds in resize_seconds)
    return Load(cells=cells, sample=partial(recorded_workload, tuple(stages), workers=workers))


def recorded_workload(stages: tuple[tuple[Demand, Demand], ...], seed: int, *, workers: int) -> Workload:
    """Sample a workload in which each iteration has the lengths and speeds that were measured in this iteration."""
    rng = np.random.default_rng(seed)
    work = tuple(
        StageWork(
            rollout=_sample_work(rollout, rng), scoring=_sample_work(scoring, rng), units_at_once=rollout.units_at_once
        )
        for rollout, scoring in stages
    )
    return Workload(stages=work, slowness_N=np.ones(workers), absences=((),) * len(work))


def _sample_work(demand: Demand, rng: np.random.Generator) -> RoleWork:
    sequences = max(demand.sequences, 1)
    return role_work(demand.pace, rng.choice(np.asarray(demand.lengths), size=(demand.units, sequences)))


@dataclass(frozen=True, slots=True)
class Ratio:
    """Mean over seeds with its 95% confidence interval."""

    mean: float
    low: float
    high: float
    seeds: int
    """Number of seeds."""

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]" if self.seeds > 1 else f"{self.mean:.3f}"


def paired_ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """Return the mean of `over / under` over the seeds. Both arguments contain one value for each seed.

    Both values of a seed were measured on the same workload, so differences in difficulty between seeds cancel out.
    """
    return interval([a / b for a, b in zip(over, under, strict=True)])


def interval(values: Sequence[float]) -> Ratio:
    """Return the mean of the values with its 95% confidence interval (Student's t). For a single value, the interval is
    infinite."""
    mean = fmean(values)
    half = float("inf")
    if len(values) > 1:
        half = float(stdtrit(len(values) - 1, 0.975)) * stdev(values) / sqrt(len(values))
    return Ratio(mean=mean, low=mean - half, high=mean + half, seeds=len(values))


LARGE = 4096
"""Minimum number of workers in a cell for which the aim on the duration of decisions applies."""


@dataclass(frozen=True, slots=True)
class Aim:
    """Bound that a ratio of times of the adaptive policy should satisfy."""

    name: str
    """Name of the aim in the printed tables."""
    bound: float
    """Value with which the ratio is compared."""
    side: Literal["at least", "at most"]
    """Direction of the bound: the ratio must be "at least" or "at most" the bound."""
    measure: Callable[[CellResult], Ratio]
    """Function that computes the ratio from the results of a cell."""
    needs: tuple[str, ...] = ("adaptive",)
    """Names of the policies whose results are needed to compute the ratio."""
    applies_to: Callable[[CellResult], bool] = lambda _: True
    """Function that returns whether the aim applies to a cell."""


@dataclass(frozen=True, slots=True)
class AimResult:
    """Result of checking one aim (bound on a ratio of times) in one cell."""

    aim: Aim
    """Aim that was checked."""
    result: CellResult
    """Results of the cell in which the aim was checked."""
    ratio: Ratio
    """Measured ratio."""

    @property
    def holds(self) -> bool:
        """Whether the mean ratio satisfies the bound of the aim."""
        mean, bound = self.ratio.mean, self.aim.bound
        return mean >= bound if self.aim.side == "at least" else mean <= bound


def _time_aim(name: str, bound: float, side: Literal["at least", "at most"], over: str, under: str) -> Aim:
    return Aim(
        name,
        bound,
        side,
        measure=lambda result: paired_ratio(result.seconds[over], result.seconds[under]),
        needs=(over, under),
    )


def _has_changing_load(result: CellResult) -> bool:
    return result.cell.scenario in ("drift", "burst") and result.tail < 1


def _best_split(result: CellResult) -> Ratio:
    return paired_ratio(result.seconds["fixed_hindsight"], result.seconds["adaptive"])


AIMS = (
    _time_aim("fixed_hindsight / adaptive", 0.97, "at least", "fixed_hindsight", "adaptive"),
    Aim(
        "the same, drift and burst, throughput-bound",
        1.2,
        "at least",
        measure=_best_split,
        needs=("fixed_hindsight", "adaptive"),
        applies_to=_has_changing_load,
    ),
    _time_aim("colocated / adaptive", 0.98, "at least", "colocated", "adaptive"),
    _time_aim("adaptive / clairvoyant", 1.15, "at most", "adaptive", "clairvoyant"),
    Aim(
        "moves per worker and iteration, handovers apart", 0.3, "at most", measure=lambda result: interval(result.moves)
    ),
    Aim(
        f"slowest decision at N = {LARGE}, s",
        0.050,
        "at most",
        measure=lambda result: interval([result.slowest_decision]),
        applies_to=lambda result: result.cell.workers >= LARGE,
    ),
)
"""All aims: bounds that the results of the adaptive policy should satisfy."""


def check_aims(results: Sequence[CellResult]) -> list[AimResult]:
    """Check every aim in every cell, and return the results.

    A cell is skipped if the aim does not apply to it, or if a policy that the aim needs was not run.
    """
    return [
        AimResult(aim=aim, result=result, ratio=aim.measure(result))
        for aim in AIMS
        for result in results
        if set(aim.needs) <= set(result.seconds) and aim.applies_to(result)
    ]
