"""Inputs of placement for tests, and a plain simulation to compare its predictions with."""

import heapq

import numpy as np

from rheostat.placement.records import (
    Demand,
    DrainInputs,
    InFlight,
    Memory,
    Pace,
    Plan,
    PlanInputs,
    ResizeCost,
    RoleProgress,
)


def lognormal(median, sigma, *, size=256, seed=0):
    return tuple(np.sort(median * np.exp(sigma * np.random.default_rng(seed).standard_normal(size))))


def demand(*, units=16, sequences=32, lengths=None, base=0.005, slope=0.0002, **others):
    pace = Pace(base_seconds=base, per_sequence_seconds=slope)
    return Demand(
        units=units, sequences=sequences, lengths=lengths or lognormal(400, 0.6), pace=pace, measured=True, **others
    )


def plan_inputs(*, workers=8, rollout=None, scoring=None, cost=1.0, current=None, memory=None, seed=0):
    return PlanInputs(
        workers=workers,
        rollout=rollout or demand(),
        scoring=scoring or demand(lengths=lognormal(200, 0.5)),
        resize=ResizeCost(mean_seconds=cost, p95_seconds=cost),
        current=current,
        memory=memory or Memory(),
        seed=seed,
    )


def split(rollout, scoring):
    return Plan(mode="split", rollout=rollout, scoring=scoring)


def turns(workers):
    return Plan(mode="colocated", rollout=workers, scoring=workers)


def drain_inputs(
    *, plan, waiting, coming, flying=(), scoring_waiting=0, scoring_flying=(), elapsed=10.0, cost=1.0, memory=None,
    rollout=None, scoring=None, movable=None, done=0,
):  # fmt: skip
    """Build the inputs for a split in the middle of a stage; `flying` are the seconds since each rollout unit began."""
    movable = movable or (plan.rollout, plan.scoring)
    return DrainInputs(
        elapsed_seconds=elapsed,
        workers=plan.rollout + plan.scoring,
        plan=plan,
        rollout=RoleProgress(
            demand=rollout or demand(), slots=plan.rollout, waiting=waiting, in_flight=_flying(flying), done=done
        ),
        scoring=RoleProgress(
            demand=scoring or demand(lengths=lognormal(200, 0.5)),
            slots=plan.scoring,
            waiting=scoring_waiting,
            coming=coming,
            in_flight=_flying(scoring_flying),
        ),
        movable_rollout=movable[0],
        movable_scoring=movable[1],
        resize=ResizeCost(mean_seconds=cost, p95_seconds=cost),
        memory=memory or Memory(),
    )


def _flying(elapsed):
    return tuple(InFlight(elapsed_seconds=seconds, sequences=32) for seconds in elapsed)


def draw_seconds(role, rng):
    """Seconds of each unit of a stage, sequence by sequence: finished ones leave the batch."""
    lengths_US = rng.choice(role.lengths, size=(role.units, role.sequences))
    steps = role.pace.base_seconds * lengths_US.max(axis=1) + role.pace.per_sequence_seconds * lengths_US.sum(axis=1)
    return role.pace.unit_seconds + role.pace.setup_seconds * role.sequences + steps


def stage_seconds(plan, rollout_U, scoring_U, *, turn=0.0, handover=False):
    """Simulate a stage as discrete events with a heap of workers, independently of the product."""
    generating, scoring = [0.0] * plan.rollout, [0.0] * plan.scoring
    done = sorted(finish(rollout_U, [0.0] * len(rollout_U), generating))
    if plan.mode == "colocated":
        done = [done[-1] + turn] * len(done)
    elif handover:
        scoring += [free + turn for free in generating]
        heapq.heapify(scoring)
    return max(finish(scoring_U, done, scoring))


def finish(seconds_U, ready_U, free):
    """Return when each unit ends. `free`, a heap of the times at which workers become free, is updated."""
    ends = []
    for seconds, ready in zip(seconds_U, ready_U, strict=True):
        ends.append(max(heapq.heappop(free), ready) + seconds)
        heapq.heappush(free, ends[-1])
    return ends
