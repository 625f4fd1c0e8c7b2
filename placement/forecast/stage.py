"""Prediction of the time of a stage under each plan, by simulating resamples of recent sequence lengths.

A unit of b sequences with lengths l, decoded as one batch, takes `unit + setup * b + A * max l + C * sum l` seconds
(the constants are the fields of `Pace`). Finished sequences leave the batch, so at the end the longest sequence is
decoded alone. This last part is called the tail. If a worker decodes c units together, the units share the base time
of the steps, and each unit takes `unit + A * max l + c * (setup * b + C * sum l)` seconds. Units are started in order,
each on the worker that is free first (list scheduling).

A lane is a place for one unit on a worker. A worker that decodes c units together has c lanes. Shapes: K candidate
plans, B bootstrap resamples, X = K × B simulated cases, U units, W lanes.

With many workers, the result depends only on the number of units per worker: each worker takes unit after unit until
the queue is empty (a renewal process), and the stage ends with the last unit in progress. Therefore a fixed number of
lanes is simulated once, and the result for any number of workers is interpolated in a table over units per worker.
Above `ROUNDS` units per worker, each further unit adds its mean time. Shapes of the table: L lanes, J consecutive units
of a lane, Q fractions of the units.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rheostat.placement.forecast.lengths import UnitSamples, sample_units
from rheostat.placement.records import Demand, Floats, Plan, PlanInputs


def list_schedule(free_XW: Floats, seconds_XU: Floats, *, ready_XU: Floats | None = None) -> tuple[Floats, Floats]:
    """Assign each unit, in order, to the worker that is free first. All times are in seconds from now.

    `free_XW` contains the time at which each worker becomes free (infinite for workers that do not exist). `ready_XU`
    contains the time from which each unit can start, in ascending order. By default all units can start immediately.
    Returns the end of each unit (X x U), and the time at which each worker has finished all of its units (X x W).
    """
    free_XW = free_XW.copy()
    cases = np.arange(free_XW.shape[0])
    ends_XU = np.empty_like(seconds_XU)
    for unit in range(seconds_XU.shape[1]):
        first_X = free_XW.argmin(axis=1)
        begin_X = free_XW[cases, first_X]
        if ready_XU is not None:
            begin_X = np.maximum(begin_X, ready_XU[:, unit])
        ends_XU[:, unit] = free_XW[cases, first_X] = begin_X + seconds_XU[:, unit]
    return ends_XU, free_XW


Ints = NDArray[np.int64]

TURNS = 1
"""Number of role changes that take additional time if roles take turns. Only the change from rollout to scoring does.
The change back takes no additional time, because under every plan all workers load new weights at the start of a
stage."""

EXACT_WORK = 8_000_000
"""Maximum size (units × cases × lanes) of a prediction that schedules every unit, which takes 20 ms on one core. Larger
predictions use tables."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicted times of the next stage under each candidate plan, without the cost of changing to this plan."""

    plans: tuple[Plan, ...]
    """Candidate plans."""
    seconds_KB: Floats
    """Predicted seconds of the stage for each plan and bootstrap resample."""


def score_plans(seconds_KB: Floats, *, risk: float) -> Floats:
    """Return the score of each plan (K) in seconds. A lower score is better.

    The score is the weighted average of the mean over all resamples (weight 1) and the mean over the slowest 25% of the
    resamples (conditional value at risk, weight `risk`).
    """
    worst_KB = np.sort(seconds_KB, axis=1)[:, -max(seconds_KB.shape[1] // 4, 1) :]
    return np.asarray((seconds_KB.mean(axis=1) + risk * worst_KB.mean(axis=1)) / (1 + risk))


def forecast(inputs: PlanInputs, plans: tuple[Plan, ...], *, bootstraps: int, handover: bool = False) -> Forecast:
    """Predict the time of the next stage under each plan. The same sampled units are used for all plans.

    With `handover`, rollout workers move to scoring as soon as there are no more rollout units. Moving takes the usual
    time.
    """
    exact = _exact_work(inputs, plans, bootstraps) <= EXACT_WORK
    samples = [
        sample_units(role, role.units if exact else TABLE_UNITS, bootstraps=bootstraps, seed=(inputs.seed, index))
        for index, role in enumerate((inputs.rollout, inputs.scoring))
    ]
    stage = _Stage(
        inputs=inputs,
        rollout=samples[0],
        scoring=samples[1],
        turns_K=np.array([plan.mode == "colocated" for plan in plans]),
        rollout_K=np.array([plan.rollout for plan in plans]),
        scoring_K=np.array([plan.scoring for plan in plans]),
        handover=handover,
    )
    seconds_KB = _scheduled(stage) if exact else _tabulated(stage)
    switches_K = np.where(stage.turns_K, TURNS * inputs.resize.mean_seconds, 0.0)
    return Forecast(plans=plans, seconds_KB=seconds_KB + switches_K[:, None])


def unit_seconds(demand: Demand, longest: Floats, tokens: Floats, *, together: Floats | float = 1.0) -> Floats:
    """Return the seconds that each unit takes if `together` units share a batch.

    `longest` contains the length of the longest sequence of each unit, `tokens` the total length of its sequences.
    """
    pace, b = demand.pace, demand.sequences
    shared = pace.setup_seconds * b + pace.per_sequence_seconds * tokens
    return np.asarray(pace.unit_seconds + pace.base_seconds * longest + together * shared)


def workers_and_batch(demand: Demand, slots_K: Ints) -> tuple[Ints, Ints]:
    """Return the number of workers that fit into the slots of each plan, and the number of units that each worker
    decodes together."""
    workers_K = np.maximum(slots_K // demand.slots, 1)
    return workers_K, np.clip(-(-demand.units // workers_K), 1, demand.units_at_once)


@dataclass(frozen=True, slots=True)
class _Stage:
    """Inputs of a prediction: the sampled units of both roles, and the slots that each candidate plan gives to each
    role."""

    inputs: PlanInputs
    rollout: UnitSamples
    scoring: UnitSamples
    turns_K: NDArray[np.bool_]
    rollout_K: Ints
    scoring_K: Ints
    handover: bool


def _scheduled(stage: _Stage) -> Floats:
    """Return the predicted seconds of the stage (K x B), computed by scheduling every unit."""
    rollout, scoring, K = stage.inputs.rollout, stage.inputs.scoring, len(stage.turns_K)
    B = stage.rollout.longest_BU.shape[0]
    done_XU, free_XW = list_schedule(*_lanes(rollout, stage.rollout, stage.rollout_K))
    end_KB: Floats = done_XU.max(axis=1, initial=0).reshape(K, B)
    if not scoring.units:
        return end_KB
    ready_KBU = release_times(np.sort(done_XU, axis=1), scoring.units).reshape(K, B, -1)
    ready_KBU = np.where(stage.turns_K[:, None, None], end_KB[:, :, None], ready_KBU)
    own_XW, seconds_XU = _lanes(scoring, stage.scoring, stage.scoring_K)
    if stage.handover:
        joining_XW = _joining(stage, free_XW)
        own_XW = np.concatenate([own_XW, joining_XW], axis=1)
    scored_XU, _ = list_schedule(own_XW, seconds_XU, ready_XU=ready_KBU.reshape(K * B, -1))
    return np.asarray(np.maximum(scored_XU.max(axis=1).reshape(K, B), end_KB))


def _joining(stage: _Stage, free_XW: Floats) -> Floats:
    """Return the time at which each rollout lane can start to score. The time is infinite if roles take turns."""
    rollout, scoring = stage.inputs.rollout, stage.inputs.scoring
    # number of rollout lanes whose slots provide one scoring lane
    stride = max(1, round(scoring.slots * rollout.units_at_once / (rollout.slots * scoring.units_at_once)))
    joining_XW = np.sort(free_XW, axis=1)[:, stride - 1 :: stride] + stage.inputs.resize.mean_seconds
    return np.where(np.repeat(stage.turns_K, free_XW.shape[0] // len(stage.turns_K))[:, None], np.inf, joining_XW)


def _lanes(demand: Demand, draws: UnitSamples, slots_K: Ints) -> tuple[Floats, Floats]:
    """Return the time at which each lane (place for one unit) is free (X x W), and the seconds of each unit (X x U).

    A lane is free at time 0. If the plan does not include the lane, it is never free.
    """
    workers_K, together_K = workers_and_batch(demand, slots_K)
    lanes_K = workers_K * together_K
    seconds_KBU = unit_seconds(
        demand, draws.longest_BU, draws.tokens_BU, together=together_K[:, None, None].astype(np.float64)
    )
    K, B, U = seconds_KBU.shape
    free_KW = np.where(np.arange(lanes_K.max()) < lanes_K[:, None], 0.0, np.inf)
    return np.repeat(free_KW, B, axis=0), seconds_KBU.reshape(K * B, U)


def release_times(done_XU: Floats, units: int) -> Floats:
    """Return the time from which each of `units` scoring units can start.

    Scoring units become ready at the same rate as rollout units finish. `done_XU` contains the times in seconds at
    which the rollout units of each of X cases end, in ascending order. The result has the shape X x units.
    """
    available = done_XU.shape[-1]
    if not available:
        return np.zeros((*done_XU.shape[:-1], units))
    return done_XU[..., np.arange(units) * available // units]


def _tabulated(stage: _Stage) -> Floats:
    """Return the predicted seconds of the stage (K x B), computed from tables instead of scheduling every unit."""
    rollout = _load(stage.inputs.rollout, stage.rollout, stage.rollout_K)
    end_KB = rollout.done()[:, :, -1]
    if not stage.inputs.scoring.units:
        return end_KB
    scoring = _load(stage.inputs.scoring, stage.scoring, stage.scoring_K)
    streamed_KB = stream_end(rollout, scoring)
    if stage.handover:
        joined_KB = handover_end(rollout, scoring, move_seconds=stage.inputs.resize.mean_seconds)
        streamed_KB = np.minimum(streamed_KB, joined_KB)
    in_turns_KB: Floats = end_KB + scoring.done()[:, :, -1]
    return np.where(stage.turns_K[:, None], in_turns_KB, streamed_KB)


def _load(demand: Demand, samples: UnitSamples, slots_K: Ints) -> "PoolLoad":
    workers_K, together_K = workers_and_batch(demand, slots_K)
    # One table serves all candidates, computed for the median number of units decoded together.
    together = float(np.median(together_K))
    seconds_BU = unit_seconds(demand, samples.longest_BU, samples.tokens_BU, together=together)
    return PoolLoad(table=tabulate(seconds_BU), units=demand.units, lanes_K=(workers_K * together).astype(np.float64))


def _exact_work(inputs: PlanInputs, plans: tuple[Plan, ...], bootstraps: int) -> int:
    roles = inputs.rollout, inputs.scoring
    lanes = max(min(inputs.workers * role.units_at_once, max(role.units, 1)) for role in roles)
    return sum(role.units for role in roles) * len(plans) * bootstraps * lanes


LANES = 64
"""Number of lanes that are simulated for a table."""
ROUNDS = 8
"""Maximum number of units per worker in a table. For more units, the time is extrapolated."""
TABLE_UNITS = LANES * (ROUNDS + 1)
"""Number of units that are simulated to compute a table."""
STEPS = 4
"""Number of table entries per unit: entries are 1/4 unit per worker apart."""
SHARES_Q = np.array([0.0, 0.05, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 0.95, 1.0])
"""Fractions of the units. For each of them, a table contains the time at which this fraction is done."""


@dataclass(frozen=True, slots=True)
class Table:
    """Table of completion times. Entry e contains the times for e / STEPS units per worker."""

    done_EBQ: Floats
    """Time in seconds at which each fraction of the units (`SHARES_Q`) is done."""
    mean_B: Floats
    """Mean time of a unit in seconds."""
    tail_B: Floats
    """Expected growth of the longest unit, in seconds, if the number of units is multiplied by e (2.718)."""

    def done(self, units_per_worker_K: Floats, *, lanes_K: Floats) -> Floats:
        """Return the time at which each fraction of the units is done (K x B x Q).

        The last fraction is 1, the end of all units. The end is the time at which the last lane finishes its unit, so
        it is later if there are more lanes than in the simulation.
        """
        top = self.done_EBQ.shape[0] - 1
        entry_K = np.minimum(units_per_worker_K * STEPS, top)
        low_K = np.minimum(entry_K.astype(np.int64), top - 1)
        part_K11 = (entry_K - low_K)[:, None, None]
        inside_KBQ = (1 - part_K11) * self.done_EBQ[low_K] + part_K11 * self.done_EBQ[low_K + 1]
        beyond_K = np.maximum(units_per_worker_K - top / STEPS, 0)
        done_KBQ: Floats = inside_KBQ + beyond_K[:, None, None] * self.mean_B[None, :, None] * SHARES_Q
        # Only the end of all units depends on the longest unit. With less than one unit per lane, some lanes are idle.
        last_K = np.maximum(np.minimum(lanes_K, lanes_K * units_per_worker_K), 1)
        simulated_K = LANES * np.minimum(np.maximum(units_per_worker_K, 1 / LANES), 1)
        done_KBQ[:, :, -1] += np.log(last_K / simulated_K)[:, None] * self.tail_B
        done_KBQ[:, :, -1] = np.maximum(done_KBQ[:, :, -1], done_KBQ[:, :, -2])
        return done_KBQ


def tabulate(seconds_BU: Floats) -> Table:
    """Return a table of completion times, computed by simulating `LANES` workers with the `TABLE_UNITS` units of
    `seconds_BU`."""
    bootstraps = seconds_BU.shape[0]
    seconds_BLJ = seconds_BU.reshape(bootstraps, LANES, ROUNDS + 1)
    ends_BLJ = np.cumsum(seconds_BLJ, axis=2)
    begins_BI = (ends_BLJ - seconds_BLJ).reshape(bootstraps, -1)
    order_BI = np.argsort(begins_BI, axis=1, kind="stable")
    ends_BI = np.take_along_axis(ends_BLJ.reshape(bootstraps, -1), order_BI, axis=1)
    done_EBQ = np.zeros((ROUNDS * STEPS + 1, bootstraps, len(SHARES_Q)))
    for entry in range(1, ROUNDS * STEPS + 1):
        count = max(LANES * entry // STEPS, 1)
        done_BI = np.sort(ends_BI[:, :count], axis=1)
        at_Q = np.maximum(np.ceil(SHARES_Q * count).astype(np.int64) - 1, 0)
        done_EBQ[entry] = done_BI[:, at_Q]
    high_B2 = np.quantile(seconds_BU, [1 - 4 / LANES, 1 - 1 / LANES], axis=1)
    return Table(done_EBQ=done_EBQ, mean_B=seconds_BU.mean(axis=1), tail_B=(high_B2[1] - high_B2[0]) / np.log(4))


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """Number of units of one role, and number of lanes (places for one unit at a time) under each candidate plan."""

    table: Table
    """Table of completion times by number of units per worker."""
    units: int
    """Number of units."""
    lanes_K: Floats
    """Number of lanes (places for one unit at a time) under each candidate plan."""

    def done(self, *, share: float = 1.0, lanes_K: Floats | None = None) -> Floats:
        """Return the time at which each fraction of the units is done (K x B x Q).

        `share` limits the computation to a fraction of the units. `lanes_K` replaces the number of lanes.
        """
        lanes_K = self.lanes_K if lanes_K is None else lanes_K
        return self.table.done(share * self.units / lanes_K, lanes_K=lanes_K)

    def work(self) -> Floats:
        """Return the total worker-seconds of all units in each resample (B)."""
        return self.units * self.table.mean_B


def stream_end(rollout: PoolLoad, scoring: PoolLoad) -> Floats:
    """Return the time at which scoring ends (K x B) if each unit is scored as soon as rollout has finished it.

    When rollout has finished a fraction q of the units, scoring still needs at least the time for the other 1 - q of
    the units. The result is the latest end that follows for any q. In addition, the last unit is scored after the end
    of rollout.
    """
    done_KBQ = rollout.done()
    end_KB = done_KBQ[:, :, -1] + scoring.table.mean_B
    for at, share in enumerate(SHARES_Q[:-1]):
        end_KB = np.maximum(end_KB, done_KBQ[:, :, at] + scoring.done(share=1 - share)[:, :, -1])
    return end_KB


def handover_end(rollout: PoolLoad, scoring: PoolLoad, *, move_seconds: float) -> Floats:
    """Return the time at which scoring ends (K x B) if rollout workers move to scoring when there are no more rollout
    units.

    Each rollout lane is busy until it moves, so on average the lanes move at (total seconds of rollout) / lanes. For
    each fraction of the units that rollout has finished, the remaining units are scored by the lanes that are available
    at that time. The tail of the last units is computed for all lanes together.
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
