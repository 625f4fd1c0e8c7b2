"""How long a stage will take under each way to deal the slots, by simulating resamples of recent lengths.

A unit of b sequences decoded as one batch takes `unit + setup * b + A * max l + C * sum l` seconds: finished sequences
leave the batch, and the longest one is decoded alone in the end (the tail). Workers that decode c units together share
the steps' base time among them: each unit lasts `unit + A * max l + c * (setup * b + C * sum l)`.

Shapes: K candidates, B bootstraps, U units, W lanes (places for a unit, c of them per worker).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.records import Demand, Plan, PlanInputs
from placement.renewal import LANES, ROUNDS, stream_end, tabulate
from placement.sampling import UnitDraws, draw_units
from placement.scheduling import list_schedule

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

TURNS = 1
"""Switches that taking turns costs beside what every plan pays: waking all workers at the begin, with new weights."""
EXACT_WORK = 8_000_000
"""Up to so many (unit, case, lane) steps every unit is scheduled; 20 ms of one core. Beyond, tables answer."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds of the coming stage by candidate and bootstrap, costs of changing the plan not included."""

    plans: tuple[Plan, ...]
    seconds_KB: Floats


def scores(seconds_KB: Floats, *, risk: float) -> Floats:
    """Weigh the mean with the mean of the worst quarter (CVaR), normalised so that scores are seconds."""
    worst_KB = np.sort(seconds_KB, axis=1)[:, -max(seconds_KB.shape[1] // 4, 1) :]
    return np.asarray((seconds_KB.mean(axis=1) + risk * worst_KB.mean(axis=1)) / (1 + risk))


def forecast(inputs: PlanInputs, plans: tuple[Plan, ...], *, bootstraps: int) -> Forecast:
    """Predict the stage under each plan; all of them meet the same random units."""
    if not plans:
        return Forecast(plans=(), seconds_KB=np.zeros((0, bootstraps)))
    exact = _exact_work(inputs, plans, bootstraps) <= EXACT_WORK
    most = LANES * (ROUNDS + 1)
    draws = [
        draw_units(role, role.units if exact else most, bootstraps=bootstraps, seed=(inputs.seed, index))
        for index, role in enumerate((inputs.rollout, inputs.scoring))
    ]
    predict = _scheduled if exact else _tabulated
    turns = np.array([plan.mode == "colocated" for plan in plans])
    rollout_K = np.array([plan.rollout for plan in plans])
    scoring_K = np.array([plan.scoring for plan in plans])
    seconds_KB = predict(inputs, draws, rollout_K, scoring_K, turns)
    switches_K = np.where(turns, TURNS * inputs.resize.mean_seconds, 0.0)
    return Forecast(plans=plans, seconds_KB=seconds_KB + switches_K[:, None])


def unit_seconds(demand: Demand, longest: Floats, tokens: Floats, *, together: Floats | float = 1.0) -> Floats:
    """Return how long units take whose longest sequence and sum of lengths are given, `together` at a time."""
    pace, b = demand.pace, demand.sequences
    shared = pace.setup_seconds * b + pace.per_sequence_seconds * tokens
    return np.asarray(pace.unit_seconds + pace.base_seconds * longest + together * shared)


def crews(demand: Demand, slots_K: Ints) -> tuple[Ints, Ints]:
    """Return how many workers the slots make, and how many units each of them decodes together."""
    workers_K = np.maximum(slots_K // demand.slots, 1)
    return workers_K, np.clip(-(-demand.units // workers_K), 1, demand.units_at_once)


def _scheduled(
    inputs: PlanInputs, draws: list[UnitDraws], rollout_K: Ints, scoring_K: Ints, turns_K: NDArray[np.bool_]
) -> Floats:
    rollout_done_KBU = _schedule_role(inputs.rollout, draws[0], rollout_K, None)
    if not inputs.scoring.units:
        return np.asarray(rollout_done_KBU.max(axis=2, initial=0))
    ready_KBU = releases(np.sort(rollout_done_KBU, axis=2), inputs.scoring.units)
    ready_KBU = np.where(turns_K[:, None, None], rollout_done_KBU.max(axis=2, initial=0)[:, :, None], ready_KBU)
    scored_KBU = _schedule_role(inputs.scoring, draws[1], scoring_K, ready_KBU)
    return np.asarray(np.maximum(scored_KBU.max(axis=2), rollout_done_KBU.max(axis=2, initial=0)))


def releases(done_XU: Floats, units: int) -> Floats:
    """When each of `units` units of scoring can begin: spread evenly over rollout's units, `done_XU` ascending."""
    available = done_XU.shape[-1]
    if not available:
        return np.zeros((*done_XU.shape[:-1], units))
    return done_XU[..., np.arange(units) * available // units]


def _schedule_role(demand: Demand, draws: UnitDraws, slots_K: Ints, ready_KBU: Floats | None) -> Floats:
    workers_K, together_K = crews(demand, slots_K)
    lanes_K = workers_K * together_K
    seconds_KBU = unit_seconds(
        demand, draws.longest_BU, draws.tokens_BU, together=together_K[:, None, None].astype(np.float64)
    )
    K, B, U = seconds_KBU.shape
    free_KW = np.where(np.arange(min(lanes_K.max(), max(U, 1))) < lanes_K[:, None], 0.0, np.inf)
    free_XW = np.repeat(free_KW, B, axis=0)
    ready_XU = None if ready_KBU is None else ready_KBU.reshape(K * B, U)
    return list_schedule(free_XW, seconds_KBU.reshape(K * B, U), ready_XU=ready_XU).reshape(K, B, U)


def _tabulated(
    inputs: PlanInputs, draws: list[UnitDraws], rollout_K: Ints, scoring_K: Ints, turns_K: NDArray[np.bool_]
) -> Floats:
    tables, loads, lanes = [], [], []
    for demand, drawn, slots_K in zip((inputs.rollout, inputs.scoring), draws, (rollout_K, scoring_K), strict=True):
        workers_K, together_K = crews(demand, slots_K)
        # One table serves all candidates: that of the crew in the middle.
        together = float(np.median(together_K))
        tables.append(tabulate(unit_seconds(demand, drawn.longest_BU, drawn.tokens_BU, together=together)))
        lanes.append((workers_K * together).astype(np.float64))
        loads.append(demand.units / lanes[-1])
    rollout_done_KBQ = tables[0].done(loads[0], lanes_K=lanes[0])
    if not inputs.scoring.units:
        return rollout_done_KBQ[:, :, -1]
    streamed_KB = stream_end(rollout_done_KBQ, tables[1], units_per_worker_K=loads[1], lanes_K=lanes[1])
    in_turns_KB: Floats = rollout_done_KBQ[:, :, -1] + tables[1].done(loads[1], lanes_K=lanes[1])[:, :, -1]
    return np.where(turns_K[:, None], in_turns_KB, streamed_KB)


def _exact_work(inputs: PlanInputs, plans: tuple[Plan, ...], bootstraps: int) -> int:
    roles = inputs.rollout, inputs.scoring
    lanes = max(min(inputs.workers * role.units_at_once, max(role.units, 1)) for role in roles)
    return sum(role.units for role in roles) * len(plans) * bootstraps * lanes
