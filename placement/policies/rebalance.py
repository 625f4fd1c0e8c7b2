"""Corrections inside a stage: predict when each role will be done, and move workers to the one that is late.

Shapes: K candidates, B bootstraps.
"""

from math import lcm

import numpy as np

from placement.forecast.remaining import remaining
from placement.forecast.stage import scores
from placement.policies.simple import unchanged
from placement.records import Decision, DrainInputs, Memory, Plan, RoleProgress

LEAST_GAIN = 0.10
"""A move must gain more than this share of what remains, and more than it costs."""
TIE = 0.02
"""Predictions that differ by less are as good as equal."""
DWELL = 2.0
"""Costs of moving that lie between two moves at least."""
OFF = 0.30
"""A prediction that is off by more than this is a miss; after `MISSES` in a row the plan stands."""
MISSES = 2
LOOKS = 0.04
"""A stage is looked at once in so large a part of it: predictions hardly change in less."""
MOVES = 8
"""Numbers of workers to move that are tried in each direction."""


def drained(inputs: DrainInputs, *, bootstraps: int, risk: float) -> Decision:
    """Return the plan with workers moved, if that is predicted to gain more than max(10%, S); else the plan as it is.

    Each worker moves once per stage (`movable_*`), moves lie 2 S apart, and where predictions were off by 30% twice in
    a row after a move the plan stands. None of this holds workers back whose own queue is empty for good: that they go
    to the other role, if only that is predicted to be faster, is part of the plan.
    """
    if inputs.plan.mode == "colocated":
        return unchanged(inputs, "roles take turns: nothing to move inside a stage")
    emptied = inputs.rollout.waiting + inputs.rollout.coming == 0
    if inputs.elapsed_seconds < inputs.memory.look_at and emptied == inputs.memory.emptied:
        return unchanged(inputs, f"looked at again {inputs.memory.look_at:.1f} s after the begin")
    moves = _moves(inputs)
    seconds_KB = remaining(inputs, moves, bootstraps=bootstraps)
    scores_K = scores(seconds_KB, risk=risk)
    kept = moves.index(0)
    as_good = [k for k in range(len(moves)) if scores_K[k] <= (1 + TIE) * scores_K.min()]
    # Of moves that are as good as equal, the smallest; but of handovers the largest: who has nothing left to generate
    # loses nothing, and whoever stays waits until the others have gone.
    best = max(as_good) if emptied and kept not in as_good else min(as_good, key=lambda k: abs(moves[k]))
    seconds = float(seconds_KB[kept].mean())
    memory = _remember(inputs, seconds)
    gain = float(scores_K[kept] - scores_K[best])
    held_back = _held_back(inputs, memory, gain, float(scores_K[kept]), move=moves[best])
    if held_back:
        return unchanged(
            inputs, f"kept {inputs.plan.rollout}/{inputs.plan.scoring}: {held_back}", seconds=seconds, memory=memory
        )
    return _moved(inputs, moves[best], float(seconds_KB[best].mean()), seconds, memory)


def _moves(inputs: DrainInputs) -> list[int]:
    """Slots to move, to scoring where positive; in steps that make whole workers on both sides."""
    step = lcm(inputs.rollout.demand.slots, inputs.scoring.demand.slots)
    to_scoring = _amounts(min(inputs.movable_rollout, _spare(inputs.rollout, inputs.plan.rollout)), step)
    to_rollout = _amounts(min(inputs.movable_scoring, _spare(inputs.scoring, inputs.plan.scoring)), step)
    return [*(-amount for amount in reversed(to_rollout)), 0, *to_scoring]


def _spare(role: RoleProgress, dealt: int) -> int:
    """Slots that the role can give away: all where nothing waits or comes, else all but its least."""
    least = max(role.demand.least_slots, role.demand.slots) if role.waiting + role.coming else 0
    return min(role.slots, dealt) - least


def _amounts(most: int, step: int) -> list[int]:
    """Every multiple of the step up to `most`, or `MOVES` of them, spread geometrically."""
    count = max(most, 0) // step
    if count <= MOVES:
        return [step * (number + 1) for number in range(count)]
    return sorted({step * round(amount) for amount in np.geomspace(1, count, MOVES)})


def _remember(inputs: DrainInputs, seconds: float) -> Memory:
    """Count misses: predictions of the stage's end that moved by 30% since the last decision, once workers were moved.

    Before that, being off is what corrections are for: the load has changed.
    """
    expected, end = inputs.memory.predicted_seconds, inputs.elapsed_seconds + seconds
    missed = expected is not None and abs(end - expected) > OFF * expected and inputs.memory.moved > 0
    misses = inputs.memory.misses
    misses = misses if misses >= MISSES else misses + 1 if missed else 0
    update = {
        "misses": misses,
        "predicted_seconds": end,
        "look_at": inputs.elapsed_seconds + LOOKS * end,
        "emptied": inputs.rollout.waiting + inputs.rollout.coming == 0,
    }
    return inputs.memory.model_copy(update=update)


def _held_back(inputs: DrainInputs, memory: Memory, gain: float, score: float, *, move: int) -> str:
    """Why the best move is not made; empty where it is."""
    cost = inputs.resize.mean_seconds
    source = inputs.rollout if move > 0 else inputs.scoring
    if move == 0 or gain <= 0:
        return "no move is predicted to be faster"
    if source.waiting + source.coming == 0:  # handed over: that was planned
        return ""
    price = max(LEAST_GAIN * score, cost)
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
