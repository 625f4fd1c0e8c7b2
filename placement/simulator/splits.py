"""Splits that never change: makespans without an event loop, and what no schedule can beat.

Suffixes: U units.
"""

from heapq import heapify, heapreplace

import numpy as np
from numpy.typing import NDArray

from placement.simulator.workload import RoleWork, StageWork

Floats = NDArray[np.float64]


def split_seconds(work: StageWork, slowness_N: Floats, rollout: int) -> float:
    """Makespan of slots 0 … rollout - 1 generating and all others scoring, whole units, nobody dying."""
    assert work.units_at_once == 1, "units that share a batch need the event loop"
    generated_U = _in_order(work.rollout.seconds_U, slowness_N[:rollout], first_slot=0, ready_U=None)
    order_U = np.argsort(generated_U, kind="stable")
    scored_U = _in_order(
        work.scoring.seconds_U[order_U], slowness_N[rollout:], first_slot=rollout, ready_U=generated_U[order_U]
    )
    return float(scored_U.max())


def colocated_seconds(work: StageWork, slowness_N: Floats, switch_seconds: float) -> float:
    """All slots generate, all switch, all score: the sum of the turns."""
    generated_U = _in_order(work.rollout.seconds_U, slowness_N, first_slot=0, ready_U=None)
    # Scoring takes the units in the order in which they were generated, as everywhere.
    order_U = np.argsort(generated_U, kind="stable")
    scored_U = _in_order(work.scoring.seconds_U[order_U], slowness_N, first_slot=0, ready_U=None)
    return float(generated_U.max() + switch_seconds + scored_U.max())


def _in_order(seconds_U: Floats, slowness_N: Floats, *, first_slot: int, ready_U: Floats | None) -> Floats:
    """When each unit ends: units in order, each on the worker that has been free the longest."""
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
    """Seconds that no schedule without knowledge of the future, nor one with it, can beat.

    The pool's speed against all work, where batches are as full as they may be; and the longest way of one unit
    through both roles on the fastest worker. Moves, turns and deaths only add to it.
    """
    speed = float((1 / slowness_N).sum())
    total = sum(float(least_seconds(role, work.units_at_once).sum()) for role in (work.rollout, work.scoring))
    longest = float((work.rollout.seconds_U + work.scoring.seconds_U).max())
    return max(total / speed, longest * float(slowness_N.min()))


def least_seconds(role: RoleWork, units_at_once: int) -> Floats:
    """Per unit, its part of a worker's time where every step's base cost is shared by a full batch."""
    if units_at_once == 1:
        return role.seconds_U
    # A step's base cost is borne by at most so many units, and a unit's share of it ends with its longest sequence.
    base_U = role.pace.base_seconds * role.lengths_US.max(axis=1) / units_at_once
    return np.asarray(role.setup_U + base_U + role.pace.per_sequence_seconds * role.lengths_US.sum(axis=1))
