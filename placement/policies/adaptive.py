"""Plan between stages and correct inside them, from what was measured.

Inside a stage it predicts when each role will be done, and moves workers to the one that is late. Shapes: K candidates,
B bootstraps.
"""

from dataclasses import dataclass
from math import lcm

import numpy as np
from numpy.typing import NDArray

from placement.config import AdaptivePlacement
from placement.forecast.remaining import remaining
from placement.forecast.stage import Forecast, forecast, scores
from placement.policies.simple import unchanged
from placement.records import Decision, DrainInputs, Memory, Plan, PlanInputs, RoleProgress, changed, described, short
from placement.slots import candidates, standing

TIE = 0.02
"""Predictions that differ by less are as good as equal."""
AT_ONCE = 0.25
"""A gain of more than this share of the stage need not hold twice."""
LEAST_GAIN = 0.01
"""A gain of less than this share of the stage is within what predictions can tell."""
LEAST_MOVE_GAIN = 0.10
"""A move must gain more than this share of what remains, and more than it costs."""
DWELL = 2.0
"""Costs of moving that lie between two moves at least."""
OFF = 0.30
"""A prediction that is off by more than this is a miss; after `MISSES` in a row the plan stands."""
MISSES = 2
LOOKS = 0.04
"""A stage is looked at once in so large a part of it: predictions hardly change in less."""
MOVES = 8
"""Numbers of workers to move that are tried in each direction."""


@dataclass(frozen=True, slots=True)
class Adaptive:
    """The least predicted time wins, if winning pays for the change.

    A change is made when its gain, summed over at least two stages in a row that want it, exceeds threshold × S (S:
    what moving costs; it is paid once, and the gain comes back in every stage). Or at once where it is more than 25%
    of the stage; not in the stage right after another change, so that inputs that alternate change the plan in every
    second stage at most.

    With corrections switched on, a split is predicted with its handover: workers of rollout score once their queue is
    empty. Then most splits beat taking turns, which is a handover with a barrier.

    Guard: taking turns is always among the candidates, and a split that would be slower than turns by more than
    threshold × S, summed since the last change, is left at once. So in predicted seconds, over any number of stages,
    stages cost at most those of taking turns + threshold × S × (changes + 1), and moving costs S × changes.
    """

    config: AdaptivePlacement

    def plan(self, inputs: PlanInputs) -> Decision:
        plans = candidates(inputs)
        cast = forecast(inputs, plans, bootstraps=self.config.bootstraps, handover=self.config.drain)
        scores_K = scores(cast.seconds_KB, risk=self.config.risk)
        best, current = _frugal(plans, scores_K), standing(inputs)
        if current is None:
            return _first(inputs, cast, best, scores_K)
        kept = plans.index(current)
        memory, pays = _weigh(inputs, self.config, plans, scores_K, kept=kept, best=best)
        return _decide(inputs, cast, memory, pays, kept=kept, best=best, scores_K=scores_K)

    def drain(self, inputs: DrainInputs) -> Decision:
        if not self.config.drain:
            return unchanged(inputs, "moving inside a stage is switched off")
        return drained(inputs, bootstraps=self.config.bootstraps, risk=self.config.risk)


def _frugal(plans: tuple[Plan, ...], scores_K: NDArray[np.float64]) -> int:
    """Of the splits as good as the best one and no worse than turns, that with the fewest workers to hand over.

    Where turns are best, turns.
    """
    least, tie = float(scores_K.min()), float(scores_K.min()) * (1 + TIE)
    splits = [k for k, plan in enumerate(plans) if plan.mode == "split" and scores_K[k] <= min(tie, scores_K[0])]
    if not splits or least == scores_K[0]:
        return int(scores_K.argmin())
    return min(splits, key=lambda k: plans[k].rollout)


def _weigh(
    inputs: PlanInputs,
    config: AdaptivePlacement,
    plans: tuple[Plan, ...],
    scores_K: NDArray[np.float64],
    *,
    kept: int,
    best: int,
) -> tuple[Memory, bool]:
    """What is remembered if nothing changes, and whether a change pays."""
    price = config.threshold * inputs.resize.mean_seconds
    gain, past = float(scores_K[kept] - scores_K[best]), inputs.memory
    behind = max(0.0, past.behind_seconds + float(scores_K[kept] - scores_K[0]))
    wanted = plans[best] if gain > LEAST_GAIN * float(scores_K[kept]) else None
    again = wanted is not None and past.wanted is not None and _same_way(plans[kept], wanted, past.wanted)
    held = 0 if wanted is None else past.held + 1 if again else 1
    gained = 0.0 if wanted is None else past.gained_seconds + gain if again else gain
    at_once = gain > max(price, AT_ONCE * float(scores_K[kept])) and past.held >= 0
    memory = Memory(wanted=wanted, held=held, gained_seconds=gained, behind_seconds=behind)
    return memory, at_once or (held >= 2 and gained > price) or behind > price


def _same_way(current: Plan, wanted: Plan, before: Plan) -> bool:
    """Whether two wishes agree: the exact split is a matter of luck, its direction is not."""
    if wanted.mode != before.mode or current.mode == "colocated":
        return wanted.mode == before.mode
    return (wanted.rollout > current.rollout) == (before.rollout > current.rollout)


def _first(inputs: PlanInputs, cast: Forecast, best: int, scores_K: NDArray[np.float64]) -> Decision:
    if not (inputs.rollout.measured and inputs.scoring.measured):
        return _unmeasured(cast)
    plan, seconds = cast.plans[best], float(cast.seconds_KB[best].mean())
    other = [k for k in range(len(cast.plans)) if (cast.plans[k].mode == "split") != (plan.mode == "split")]
    rival = ""
    if other:
        second = min(other, key=lambda k: float(scores_K[k]))
        name = "taking turns" if cast.plans[second].mode == "colocated" else "the best split"
        rival = f", {name} {cast.seconds_KB[second].mean():.1f} s"
    reason = f"{described(plan)}: predicted {seconds:.1f} s{rival}"
    memory = Memory(held=-1, predicted_seconds=seconds)
    return Decision(plan=plan, predicted_seconds=seconds, unchanged_seconds=seconds, reason=reason, memory=memory)


def _unmeasured(cast: Forecast) -> Decision:
    """Take turns: a split by guessed paces can be many times slower than turns, turns never."""
    plan, seconds = cast.plans[0], float(cast.seconds_KB[0].mean())
    reason = f"nothing is measured yet, so {described(plan)}: {seconds:.1f} s by a guess"
    memory = Memory(predicted_seconds=seconds)
    return Decision(plan=plan, predicted_seconds=seconds, unchanged_seconds=seconds, reason=reason, memory=memory)


def _decide(
    inputs: PlanInputs,
    cast: Forecast,
    memory: Memory,
    pays: bool,
    *,
    kept: int,
    best: int,
    scores_K: NDArray[np.float64],
) -> Decision:
    current, cost = cast.plans[kept], inputs.resize.mean_seconds
    unchanged_seconds = float(cast.seconds_KB[kept].mean())
    if pays and best != kept:
        stage, plan = float(cast.seconds_KB[best].mean()), cast.plans[best]
        seconds = stage + cost
        reason = (
            f"{changed(current, plan)}: predicted {stage:.1f} s instead of {unchanged_seconds:.1f} s, "
            f"and {cost:.1f} s once for moving"
        )
        memory = Memory(held=-1)
    else:
        seconds, plan = unchanged_seconds, current
        reason = f"kept {short(current)}: {_why_kept(memory, float(scores_K[kept] - scores_K[best]), cost)}"
    memory = memory.model_copy(update={"predicted_seconds": seconds})
    return Decision(
        plan=plan, predicted_seconds=seconds, unchanged_seconds=unchanged_seconds, reason=reason, memory=memory
    )


def _why_kept(memory: Memory, gain: float, cost: float) -> str:
    if memory.wanted is not None:
        return f"{short(memory.wanted)} would gain {gain:.1f} s, and is taken if that holds"
    if gain <= 0:
        return "no other way is predicted to be faster"
    return f"the best change would gain {gain:.1f} s, less than the {cost:.1f} s that moving costs"


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
    price = max(LEAST_MOVE_GAIN * score, cost)
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
