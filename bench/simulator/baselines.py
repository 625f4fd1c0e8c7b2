"""Baselines for placement policies: fixed splits, a periodic planner, the best splits in hindsight, and a lower bound.

Fixed splits and the lower bound are computed directly, without simulating events.

Shapes: I iterations, N slots, U units.
"""

from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from bench.simulator.stage import SimulatedRole, Stage
from bench.simulator.workload import RoleWork, StageWork, Workload
from rheostat.placement.records import Decision, DrainInputs, Floats, Memory, Plan, PlanInputs


def split_seconds(work: StageWork, slowness_N: Floats, rollout: int) -> float:
    """Return the seconds of a stage in which slots 0 to `rollout - 1` run rollout and the other slots score.

    Each worker processes one unit at a time, and no worker fails.
    """
    assert work.units_at_once == 1, "each worker processes one unit at a time"
    generated_U = _in_order(work.rollout.seconds_U, slowness_N[:rollout], first_slot=0, ready_U=None)
    order_U = np.argsort(generated_U, kind="stable")
    scored_U = _in_order(
        work.scoring.seconds_U[order_U], slowness_N[rollout:], first_slot=rollout, ready_U=generated_U[order_U]
    )
    return float(scored_U.max())


def colocated_seconds(work: StageWork, slowness_N: Floats, switch_seconds: float) -> float:
    """Return the seconds of a stage in which all slots first run rollout, then change roles, and then score."""
    generated_U = _in_order(work.rollout.seconds_U, slowness_N, first_slot=0, ready_U=None)
    # Units are scored in the order in which they were generated, as in all other simulations.
    order_U = np.argsort(generated_U, kind="stable")
    scored_U = _in_order(work.scoring.seconds_U[order_U], slowness_N, first_slot=0, ready_U=None)
    return float(generated_U.max() + switch_seconds + scored_U.max())


def _in_order(seconds_U: Floats, slowness_N: Floats, *, first_slot: int, ready_U: Floats | None) -> Floats:
    """Return the time at which each unit ends. Units are assigned in order, each to the worker that has been free the
    longest."""
    free = [(0.0, first_slot + slot) for slot in range(len(slowness_N))]
    heapify(free)
    slowness = slowness_N.tolist()
    ends = []
    ready = ready_U.tolist() if ready_U is not None else [0.0] * len(seconds_U)
    for seconds, earliest in zip(seconds_U.tolist(), ready, strict=True):
        at, slot = free[0]
        end = max(at, earliest) + seconds * slowness[slot - first_slot]
        heapreplace(free, (end, slot))
        ends.append(end)
    return np.asarray(ends)


def lower_bound(work: StageWork, slowness_N: Floats) -> float:
    """Return a lower bound on the seconds of a stage. No schedule can be faster, even if it knows the future.

    This is the larger of two bounds: the time of all work if all workers always have full batches, and the longest time
    that one unit takes for rollout and scoring on the fastest worker. Moves of workers and failures only increase the
    time.
    """
    speed = float((1 / slowness_N).sum())
    total = sum(float(min_seconds(role, work.units_at_once).sum()) for role in (work.rollout, work.scoring))
    longest = float((work.rollout.seconds_U + work.scoring.seconds_U).max())
    return max(total / speed, longest * float(slowness_N.min()))


def min_seconds(role: RoleWork, units_at_once: int) -> Floats:
    """Return the minimum worker-seconds of each unit (U). The constant time of each step is divided among the sequences
    of a full batch."""
    if units_at_once == 1:
        return role.seconds_U
    # At most `units_at_once` units share the constant time of a step. A unit takes part until its longest
    # sequence ends.
    base_U = role.pace.base_seconds * role.lengths_US.max(axis=1) / units_at_once
    return np.asarray(role.setup_U + base_U + role.pace.per_sequence_seconds * role.lengths_US.sum(axis=1))


ALL_SPLITS = 64
"""Maximum number of workers for which every split is simulated. With more workers, a coarse grid of splits is simulated
first, and then refined around the best split."""

GRID = 17

PERIOD = 4
"""Number of iterations between two plans of the periodic planner."""


@dataclass(frozen=True, slots=True)
class Hindsight:
    """Simulated seconds of each iteration under different splits of the workers."""

    seconds: dict[int, tuple[float, ...]]
    """Seconds of each iteration, by number of rollout slots."""

    def fixed(self, rollout: int) -> tuple[float, ...]:
        """Return the seconds of each iteration with the simulated split that is closest to `rollout` rollout slots."""
        return self.seconds[min(self.seconds, key=lambda tried: abs(tried - rollout))]

    def best_fixed(self) -> tuple[float, ...]:
        """Return the seconds of each iteration with the split for which the total time of all iterations is
        shortest."""
        return min(self.seconds.values(), key=sum)

    def best_each(self) -> tuple[float, ...]:
        """Return the seconds of each iteration with the split that is best for this iteration."""
        return tuple(min(each) for each in zip(*self.seconds.values(), strict=True))


def hindsight(workload: Workload) -> Hindsight:
    """Simulate fixed splits of the workers between rollout and scoring, and return the seconds of each split.

    With more than `ALL_SPLITS` workers, not every split is simulated. The best split over all iterations and the best
    split of each iteration are then found with a precision of 1/256 of the workers.
    """
    workers = workload.workers
    tried: dict[int, tuple[float, ...]] = {}

    def attempt(rollout: int) -> None:
        if 1 <= rollout < workers and rollout not in tried:
            tried[rollout] = split_run(workload, rollout)

    whole = workers <= ALL_SPLITS
    grid = range(1, workers) if whole else np.linspace(1, workers - 1, GRID).round().astype(int).tolist()
    for rollout in grid:
        attempt(rollout)
    for rollout in (workers // 4, workers // 2, workers - workers // 4):
        attempt(rollout)
    gap = 1 if whole else workers // GRID
    while gap > max(1, workers // 256):
        gap //= 2
        bests = {min(tried, key=lambda rollout: sum(tried[rollout]))}
        bests |= {min(tried, key=lambda rollout: tried[rollout][i]) for i in range(len(workload.stages))}
        for best in bests:
            attempt(best - gap)
            attempt(best + gap)
    return Hindsight(seconds=tried)


def split_run(workload: Workload, rollout: int) -> tuple[float, ...]:
    """Return the seconds of each iteration if all iterations use the same split."""
    workers = workload.workers
    if workload.simple:
        return tuple(split_seconds(stage, workload.slowness_N, rollout) for stage in workload.stages)
    roles: list[SimulatedRole] = ["rollout" if slot < rollout else "scoring" for slot in range(workers)]
    plan = Plan(mode="split", rollout=rollout, scoring=workers - rollout)
    return _staged(workload, plan, roles, move_seconds=0.0)


def colocated_run(workload: Workload, resize_seconds: float) -> tuple[float, ...]:
    """Return the seconds of each iteration if roles take turns, so that all slots switch to scoring once per iteration.

    The switch back to rollout is not counted, because every plan begins an iteration by loading new weights.
    """
    if workload.simple:
        return tuple(colocated_seconds(stage, workload.slowness_N, resize_seconds) for stage in workload.stages)
    workers = workload.workers
    plan = Plan(mode="colocated", rollout=workers, scoring=workers)
    return _staged(workload, plan, ["rollout"] * workers, move_seconds=resize_seconds)


def co_resident_run(workload: Workload) -> tuple[float, ...]:
    """Return the seconds of each iteration if every slot has both models in memory and works on rollout units first."""
    return tuple(co_resident_seconds(stage, workload.slowness_N) for stage in workload.stages)


def lower_bound_run(workload: Workload) -> tuple[float, ...]:
    """Return the lower bound on the seconds of each iteration."""
    return tuple(lower_bound(stage, workload.slowness_N) for stage in workload.stages)


def co_resident_seconds(work: StageWork, slowness_N: Floats) -> float:
    """Return the seconds of a stage in which every slot has both models in memory, so that changing roles takes no
    time.

    Each worker processes one unit at a time, and no worker fails.
    """
    assert work.units_at_once == 1, "each worker processes one unit at a time"
    free = [(0.0, slot) for slot in range(len(slowness_N))]
    heapify(free)
    to_generate = iter(enumerate(work.rollout.seconds_U.tolist()))
    ready: list[tuple[float, int]] = []
    last = 0.0
    for _ in range(2 * len(work.rollout.seconds_U)):
        now, slot = heappop(free)
        unit, seconds = next(to_generate, (-1, 0.0))
        generating = unit >= 0
        if not generating:
            at, unit = heappop(ready)
            now, seconds = max(now, at), float(work.scoring.seconds_U[unit])
        end = now + seconds * float(slowness_N[slot])
        heappush(free, (end, slot))
        if generating:
            heappush(ready, (end, unit))
        last = max(last, end)
    return last


@dataclass(frozen=True, slots=True)
class Periodic:
    """Placement policy that changes the split only in every fourth iteration. The new split has the ratio of the
    worker-seconds that rollout and scoring took in the last iteration."""

    def plan(self, inputs: PlanInputs) -> Decision:
        age = inputs.memory.held
        current = inputs.current
        if current is None or current.mode != "split" or age >= PERIOD:
            busy = inputs.rollout.busy_seconds, inputs.scoring.busy_seconds
            share = busy[0] / sum(busy) if min(busy) > 0 else 0.5
            rollout = min(max(round(inputs.workers * share), 1), inputs.workers - 1)
            current, age = Plan(mode="split", rollout=rollout, scoring=inputs.workers - rollout), 0
        return _decision(current, Memory(held=age + 1), f"planned every {PERIOD} iterations")

    def drain(self, inputs: DrainInputs) -> Decision:
        return _decision(inputs.plan, inputs.memory, "the split changes only between stages")


def _decision(plan: Plan, memory: Memory, reason: str) -> Decision:
    return Decision(plan=plan, predicted_seconds=0.0, unchanged_seconds=0.0, reason=reason, memory=memory)


def _staged(workload: Workload, plan: Plan, roles: list[SimulatedRole], *, move_seconds: float) -> tuple[float, ...]:
    return tuple(
        Stage(work, workload.slowness_N, plan=plan, roles=roles, move_seconds=move_seconds)
        .run(absences=absences)
        .seconds
        for work, absences in zip(workload.stages, workload.absences, strict=True)
    )
