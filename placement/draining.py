"""Corrections inside a stage: predict when each role will be done, and move workers to the one that is late.

Shapes: K candidates, B bootstraps, F units in flight, W lanes, U units.
"""

from dataclasses import dataclass
from math import lcm

import numpy as np
from numpy.typing import NDArray

from placement.prediction import releases, unit_seconds
from placement.records import Decision, DrainInputs, Memory, Plan, RoleProgress
from placement.residual import residuals
from placement.sampling import draw_units
from placement.scheduling import list_schedule
from placement.unchanged import unchanged

Floats = NDArray[np.float64]

LEAST_GAIN = 0.10
"""A move must gain more than this share of what remains, and more than it costs."""
DWELL = 2.0
"""Costs of moving that lie between two moves at least."""
OFF = 0.30
"""A prediction that is off by more than this is a miss; after `MISSES` in a row the plan stands."""
MISSES = 2
LANES = 64
"""Beyond so many workers a stage is predicted at a smaller scale."""
NEVER = 1e9
"""Seconds that work takes for which no worker is left."""
MOVES = 12
"""Numbers of workers to move that are tried in each direction."""


@dataclass(frozen=True, slots=True)
class RoleState:
    """A role as it stands, at the scale of the prediction."""

    free_BW: Floats
    """Seconds until each of its lanes is free, ascending: 0 for idle workers."""
    seconds_BU: Floats
    """Seconds of the units that are not begun: those that wait, then those that come."""
    waiting: int
    lanes_per_slot: float


def drained(inputs: DrainInputs, *, bootstraps: int, risk: float) -> Decision:
    """Return the plan with workers moved, if that is predicted to gain more than max(10%, S); else the plan as it is.

    Each worker moves once per stage (`movable_*`), moves lie 2 S apart, and where predictions were off by 30% twice in
    a row the plan stands. Workers whose own queue is empty for good move for any gain above the cost of moving.
    """
    if inputs.plan.mode == "colocated":
        return unchanged(inputs, "roles take turns: nothing to move inside a stage")
    moves_K = _moves(inputs)
    seconds_KB = _predict(inputs, moves_K, bootstraps)
    worst_KB = np.sort(seconds_KB, axis=1)[:, -max(bootstraps // 4, 1) :]
    scores_K = (seconds_KB.mean(axis=1) + risk * worst_KB.mean(axis=1)) / (1 + risk)
    best, kept = int(scores_K.argmin()), int(np.flatnonzero(moves_K == 0)[0])
    seconds = float(seconds_KB[kept].mean())
    memory = _remember(inputs, seconds)
    gain = float(scores_K[kept] - scores_K[best])
    held_back = _held_back(inputs, memory, gain, float(scores_K[kept]), move=int(moves_K[best]))
    if held_back:
        return unchanged(
            inputs, f"kept {inputs.plan.rollout}/{inputs.plan.scoring}: {held_back}", seconds=seconds, memory=memory
        )
    return _moved(inputs, int(moves_K[best]), float(seconds_KB[best].mean()), seconds, memory)


def _moves(inputs: DrainInputs) -> NDArray[np.int64]:
    """Slots to move, to scoring where positive; in steps that make whole workers on both sides."""
    step = lcm(inputs.rollout.demand.slots, inputs.scoring.demand.slots)
    to_scoring = _amounts(min(inputs.movable_rollout, _spare(inputs.rollout)), step)
    to_rollout = _amounts(min(inputs.movable_scoring, _spare(inputs.scoring)), step)
    return np.array([-amount for amount in reversed(to_rollout)] + [0, *to_scoring], dtype=np.int64)


def _spare(role: RoleProgress) -> int:
    """Slots that the role can give away: all where nothing waits or comes, else all but its least."""
    return role.slots - (max(role.demand.least_slots, role.demand.slots) if role.waiting + role.coming else 0)


def _amounts(most: int, step: int) -> list[int]:
    """Every multiple of the step up to `most`, or `MOVES` of them, spread geometrically."""
    count = max(most, 0) // step
    if count <= MOVES:
        return [step * (number + 1) for number in range(count)]
    return sorted({step * round(amount) for amount in np.geomspace(1, count, MOVES)})


def _remember(inputs: DrainInputs, seconds: float) -> Memory:
    """Count misses: predictions of the stage's end that moved by 30% since the last decision."""
    expected, end = inputs.memory.predicted_seconds, inputs.elapsed_seconds + seconds
    missed = expected is not None and abs(end - expected) > OFF * expected
    misses = inputs.memory.misses
    misses = misses if misses >= MISSES else misses + 1 if missed else 0
    return inputs.memory.model_copy(update={"misses": misses, "predicted_seconds": end})


def _held_back(inputs: DrainInputs, memory: Memory, gain: float, score: float, *, move: int) -> str:
    """Why the best move is not made; empty where it is."""
    cost = inputs.resize.mean_seconds
    source = inputs.rollout if move > 0 else inputs.scoring
    price = 0.0 if source.waiting + source.coming == 0 else max(LEAST_GAIN * score, cost)
    if move == 0 or gain <= 0:
        return "no move is predicted to be faster"
    if memory.misses >= MISSES:
        return "predictions were off by 30% twice, so the plan stands"
    if inputs.elapsed_seconds - memory.moved_at < DWELL * cost:
        return f"workers were moved {inputs.elapsed_seconds - memory.moved_at:.1f} s ago"
    if gain <= price:
        return f"the best move would gain {gain:.1f} s, less than {price:.1f} s"
    return ""


def _moved(inputs: DrainInputs, move: int, seconds: float, unmoved: float, memory: Memory) -> Decision:
    plan = Plan(mode="split", rollout=inputs.plan.rollout - move, scoring=inputs.plan.scoring + move)
    source, target = ("rollout", "scoring") if move > 0 else ("scoring", "rollout")
    update = {
        "moved_at": inputs.elapsed_seconds,
        "moved": memory.moved + abs(move),
        "predicted_seconds": inputs.elapsed_seconds + seconds,
    }
    return Decision(
        plan=plan,
        predicted_seconds=seconds,
        unchanged_seconds=unmoved,
        reason=f"moved {abs(move)} of {inputs.workers} workers from {source} to {target}: predicted {seconds:.1f} s"
        f" instead of {unmoved:.1f} s",
        memory=memory.model_copy(update=update),
    )


def _predict(inputs: DrainInputs, moves_K: NDArray[np.int64], bootstraps: int) -> Floats:
    """Seconds to the end of the stage, for each move and bootstrap."""
    scale = max(1.0, inputs.workers / LANES)
    rollout = _state(inputs.rollout, scale, bootstraps, seed=(inputs.seed, 0))
    scoring = _state(inputs.scoring, scale, bootstraps, seed=(inputs.seed, 1))
    cost = inputs.resize.mean_seconds
    ends = [_end(rollout, scoring, move / scale, cost) for move in moves_K]
    return np.stack(ends)


def _state(role: RoleProgress, scale: float, bootstraps: int, *, seed: tuple[int, ...]) -> RoleState:
    demand = role.demand
    begun = len(role.in_flight)
    together = min(
        demand.units_at_once, max(1, -(-(begun + role.waiting + role.coming) * demand.slots // max(role.slots, 1)))
    )
    drawn = draw_units(demand, 256, bootstraps=bootstraps, seed=seed)
    pool_BP = unit_seconds(demand, drawn.longest_BU, drawn.tokens_BU, together=together)
    lanes = role.slots // demand.slots * together
    residual_BF = residuals(pool_BP, np.array([unit.elapsed_seconds for unit in role.in_flight]), seed=(*seed, 1))
    idle_BW = np.zeros((bootstraps, max(lanes - begun, 0)))
    free_BW = np.sort(np.concatenate([idle_BW, residual_BF], axis=1), axis=1)
    if scale > 1:
        size = max(1, round(free_BW.shape[1] / scale)) if free_BW.shape[1] else 0
        # The longest unit under way is kept: it is the tail.
        free_BW = free_BW[:, np.linspace(0, free_BW.shape[1] - 1, size).round().astype(np.int64)] if size else free_BW
    waiting, coming = round(role.waiting / scale), round(role.coming / scale)
    at_U = np.arange(waiting + coming) % pool_BP.shape[1]
    return RoleState(
        free_BW=free_BW, seconds_BU=pool_BP[:, at_U], waiting=waiting, lanes_per_slot=together / demand.slots
    )


def _end(rollout: RoleState, scoring: RoleState, move: float, cost: float) -> Floats:
    """Seconds to the end of both roles if `move` slots go to scoring (to rollout where negative)."""
    from_rollout_BW, from_scoring_BW = rollout.free_BW, scoring.free_BW
    leaving = round(abs(move) * (rollout if move > 0 else scoring).lanes_per_slot)
    arriving = round(abs(move) * (scoring if move > 0 else rollout).lanes_per_slot)
    if move > 0:
        from_rollout_BW, from_scoring_BW = _shifted(from_rollout_BW, from_scoring_BW, leaving, arriving, cost)
    elif move < 0:
        from_scoring_BW, from_rollout_BW = _shifted(from_scoring_BW, from_rollout_BW, leaving, arriving, cost)
    done_BU = _done(rollout, from_rollout_BW, None)
    # Units under way end on workers that leave, too.
    done_BU = np.sort(np.concatenate([done_BU, rollout.free_BW], axis=1), axis=1)
    coming = scoring.seconds_BU.shape[1] - scoring.waiting
    ready_BU = np.concatenate([np.zeros((done_BU.shape[0], scoring.waiting)), releases(done_BU, coming)], axis=1)
    scored_BU = _done(scoring, from_scoring_BW, ready_BU)
    last = [ends.max(axis=1, initial=0) for ends in (done_BU, scored_BU, scoring.free_BW)]
    end_B: Floats = np.maximum.reduce(last)
    return end_B


def _shifted(source_BW: Floats, target_BW: Floats, leaving: int, arriving: int, cost: float) -> tuple[Floats, Floats]:
    """Move the lanes that are free first; each serves the other role `cost` seconds after its unit has ended."""
    gone_BW = source_BW[:, :leaving]
    at_W = np.minimum(np.arange(arriving) * max(leaving, 1) // max(arriving, 1), max(leaving - 1, 0))
    arrived_BW = gone_BW[:, at_W] + cost if leaving else np.zeros((source_BW.shape[0], 0))
    return source_BW[:, leaving:], np.concatenate([target_BW, arrived_BW], axis=1)


def _done(role: RoleState, free_BW: Floats, ready_BU: Floats | None) -> Floats:
    if not role.seconds_BU.shape[1]:
        return role.seconds_BU
    if not free_BW.shape[1]:  # nobody is left to do it
        return np.full_like(role.seconds_BU, NEVER)
    return list_schedule(free_BW, role.seconds_BU, ready_XU=ready_BU)
