"""Many workers: when a stage ends, from a table over units per worker instead of scheduling every unit.

With many workers, list scheduling depends on units per worker alone: every worker goes from unit to unit on its own
until the queue is empty (a renewal process), and the stage ends with the last unit under way. So some lanes simulated
once answer for every number of workers. Beyond `ROUNDS` units per worker the end grows by the mean seconds of a unit.

Shapes: B bootstraps, L lanes, J units of a lane in turn, Q shares of the units, K candidates.
"""

from dataclasses import dataclass

import numpy as np

from placement.records import Floats

LANES = 64
ROUNDS = 8
TABLE_UNITS = LANES * (ROUNDS + 1)
"""Units that a table is made from."""
STEPS = 4
"""Entries of the table per unit and worker."""
SHARES_Q = np.array([0.0, 0.05, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 0.95, 1.0])
"""Shares of the units whose completion is looked at."""


@dataclass(frozen=True, slots=True)
class Table:
    """Completion times by units per worker; entry e stands for e / STEPS units per worker."""

    done_EBQ: Floats
    """When a share of the units is done."""
    mean_B: Floats
    """Mean seconds of a unit."""
    tail_B: Floats
    """Seconds by which the longest of e times as many units is longer."""

    def done(self, units_per_worker_K: Floats, *, lanes_K: Floats) -> Floats:
        """Return when each share of the units is done; the share 1 is the end.

        The end is the last of the units under way, one on each lane: with more lanes than were simulated it is later.
        """
        top = self.done_EBQ.shape[0] - 1
        entry_K = np.minimum(units_per_worker_K * STEPS, top)
        low_K = np.minimum(entry_K.astype(np.int64), top - 1)
        part_K11 = (entry_K - low_K)[:, None, None]
        inside_KBQ = (1 - part_K11) * self.done_EBQ[low_K] + part_K11 * self.done_EBQ[low_K + 1]
        beyond_K = np.maximum(units_per_worker_K - top / STEPS, 0)
        done_KBQ: Floats = inside_KBQ + beyond_K[:, None, None] * self.mean_B[None, :, None] * SHARES_Q
        # The last share alone has a tail; few units per lane leave lanes without one.
        last_K = np.maximum(np.minimum(lanes_K, lanes_K * units_per_worker_K), 1)
        simulated_K = LANES * np.minimum(np.maximum(units_per_worker_K, 1 / LANES), 1)
        done_KBQ[:, :, -1] += np.log(last_K / simulated_K)[:, None] * self.tail_B
        done_KBQ[:, :, -1] = np.maximum(done_KBQ[:, :, -1], done_KBQ[:, :, -2])
        return done_KBQ


def tabulate(seconds_BU: Floats) -> Table:
    """Simulate `LANES` workers with units drawn from `seconds_BU` (`TABLE_UNITS` of them)."""
    bootstraps = seconds_BU.shape[0]
    seconds_BLJ = seconds_BU.reshape(bootstraps, LANES, ROUNDS + 1)
    ends_BLJ = np.cumsum(seconds_BLJ, axis=2)
    begins_BI = (ends_BLJ - seconds_BLJ).reshape(bootstraps, -1)
    order_BI = np.argsort(begins_BI, axis=1, kind="stable")
    ends_BI = np.take_along_axis(ends_BLJ.reshape(bootstraps, -1), order_BI, axis=1)
    done_EBQ = np.zeros((ROUNDS * STEPS + 1, bootstraps, len(SHARES_Q)))
    for entry in range(1, ROUNDS * STEPS + 1):
        taken = max(LANES * entry // STEPS, 1)
        done_BI = np.sort(ends_BI[:, :taken], axis=1)
        at_Q = np.maximum(np.ceil(SHARES_Q * taken).astype(np.int64) - 1, 0)
        done_EBQ[entry] = done_BI[:, at_Q]
    high_B2 = np.quantile(seconds_BU, [1 - 4 / LANES, 1 - 1 / LANES], axis=1)
    return Table(done_EBQ=done_EBQ, mean_B=seconds_BU.mean(axis=1), tail_B=(high_B2[1] - high_B2[0]) / np.log(4))


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """Units of one role on the lanes of each candidate."""

    table: Table
    units: int
    lanes_K: Floats

    def done(self, *, share: float = 1.0, lanes_K: Floats | None = None) -> Floats:
        """Return when each share [K, B, Q] of a share of the units is done, on these or other lanes."""
        lanes_K = self.lanes_K if lanes_K is None else lanes_K
        return self.table.done(share * self.units / lanes_K, lanes_K=lanes_K)

    def work(self) -> Floats:
        """Lane-seconds [B] of all units."""
        return self.units * self.table.mean_B


def stream_end(rollout: PoolLoad, scoring: PoolLoad) -> Floats:
    """Return when scoring ends [K, B] that takes units as rollout finishes them.

    From whenever a share of the units is there, the others still need their time on the scoring workers; the latest of
    these bounds is the end. The last unit is scored after rollout's end.
    """
    done_KBQ = rollout.done()
    end_KB = done_KBQ[:, :, -1] + scoring.table.mean_B
    for at, share in enumerate(SHARES_Q[:-1]):
        end_KB = np.maximum(end_KB, done_KBQ[:, :, at] + scoring.done(share=1 - share)[:, :, -1])
    return end_KB


def handover_end(rollout: PoolLoad, scoring: PoolLoad, *, move_seconds: float) -> Floats:
    """Return when scoring ends [K, B] if each worker of rollout scores too, once its own queue is empty.

    All lanes of rollout work until they join, so they join after work / lanes on average. From whenever a share of the
    units is there, what is left flows through the lanes that are there; the last units have the tail that they have on
    all lanes.
    """
    done_KBQ = rollout.done()
    join_KB = (rollout.work() / rollout.lanes_K[:, None]) + move_seconds
    own_K1, joined_K1 = scoring.lanes_K[:, None], rollout.lanes_K[:, None]
    all_K = scoring.lanes_K + rollout.lanes_K
    end_KB = np.zeros_like(join_KB)
    for at, share in enumerate(SHARES_Q[:-1]):
        begin_KB = done_KBQ[:, :, at]
        lost_KB = own_K1 * begin_KB + joined_K1 * np.maximum(join_KB, begin_KB)
        end_KB = np.maximum(end_KB, (lost_KB + (1 - share) * scoring.work()) / all_K[:, None])
    tail_KB = scoring.done(lanes_K=all_K)[:, :, -1] - scoring.work() / all_K[:, None]
    return np.asarray(np.maximum(end_KB + np.maximum(tail_KB, 0), done_KBQ[:, :, -1] + scoring.table.mean_B))
