"""Adaptive placement policy: plans between stages and corrections during stages, from measurements.

During a stage the policy predicts when each role will finish, and moves workers to the role that is late.

Shapes: K candidate plans, B bootstrap resamples.
"""

from dataclasses import dataclass
from math import lcm

import numpy as np
from numpy.typing import NDArray

from placement.config import AdaptivePlacement
from placement.forecast.remaining import remaining
from placement.forecast.stage import Forecast, forecast, scores
from placement.policies.simple import unchanged
from placement.records import (
    Decision,
    DrainInputs,
    Memory,
    Plan,
    PlanInputs,
    RoleProgress,
    describe_change,
    describe_plan,
    short_label,
)
from placement.slots import candidates, find_current_plan

TIE = 0.02
"""Relative difference below which two predictions are treated as equal."""
AT_ONCE = 0.25
"""Gain, as a share of the stage, above which a change is made without waiting for a second stage."""
MIN_GAIN = 0.01
"""Gain, as a share of the stage, below which a change is within the error of predictions."""
MIN_MOVE_GAIN = 0.10
"""Minimum gain of a move during a stage, as a share of the remaining time. The gain must also exceed the cost."""
DWELL = 2.0
"""Minimum time between two moves, as a multiple of the cost of moving."""
OFF = 0.30
"""Relative error from which a prediction counts as a miss. After `MISSES` misses in a row the plan is no longer
changed."""
MISSES = 2
"""Number of misses in a row after which the plan is no longer changed."""
LOOKS = 0.04
"""Time between two evaluations of a stage, as a share of the stage. Predictions hardly change in less time."""
MOVES = 8
"""Number of amounts of workers that are tried in each direction."""


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Placement policy that chooses the plan with the minimum predicted time, if the gain pays for the change.

    Let S be the cost of moving, which is paid once, while the gain recurs in every stage. A change is made if its gain,
    summed over at least two stages in a row in which it was wanted, exceeds threshold × S. A gain of more than 25% of
    the stage is enough at once, except in the stage right after another change. So alternating inputs change the plan
    at most in every second stage.

    With corrections switched on, the prediction for a split includes the handover: workers of rollout score as soon as
    their queue is empty. Then most splits are faster than taking turns, which is a handover that waits for all workers.

    Guard: taking turns is always a candidate. A split that has been slower than taking turns by more than threshold ×
    S, summed since the last change, is left at once. Therefore, in predicted seconds over any number of stages, the
    stages cost at most those of taking turns + threshold × S × (changes + 1), and moving costs S × changes.
    """

    config: AdaptivePlacement
    """Settings of the policy."""

    def plan(self, inputs: PlanInputs) -> Decision:
        plans = candidates(inputs)
        cast = forecast(inputs, plans, bootstraps=self.config.bootstraps, handover=self.config.drain)
        scores_K = scores(cast.seconds_KB, risk=self.config.risk)
        best, current = _prefer_few_rollout_slots(plans, scores_K), find_current_plan(inputs)
        if current is None:
            return _decide_first(inputs, cast, best, scores_K)
        kept = plans.index(current)
        memory, pays = _weigh(inputs, self.config, plans, scores_K, kept=kept, best=best)
        return _decide(inputs, cast, memory, pays, kept=kept, best=best, scores_K=scores_K)

    def drain(self, inputs: DrainInputs) -> Decision:
        if not self.config.drain:
            return unchanged(inputs, "moves during a stage are switched off (placement.drain)")
        return correct_plan(inputs, bootstraps=self.config.bootstraps, risk=self.config.risk)


def _prefer_few_rollout_slots(plans: tuple[Plan, ...], scores_K: NDArray[np.float64]) -> int:
    """Return the index of the preferred plan: among splits close to the best score, the one with fewest rollout slots.

    Only splits that are no worse than taking turns are considered. If taking turns is best, its index is returned.
    """
    lowest, tie = float(scores_K.min()), float(scores_K.min()) * (1 + TIE)
    splits = [k for k, plan in enumerate(plans) if plan.mode == "split" and scores_K[k] <= min(tie, scores_K[0])]
    if not splits or lowest == scores_K[0]:
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
    """Return the state to remember if nothing changes, and whether a change pays."""
    price = config.threshold * inputs.resize.mean_seconds
    gain, past = float(scores_K[kept] - scores_K[best]), inputs.memory
    behind = max(0.0, past.behind_seconds + float(scores_K[kept] - scores_K[0]))
    wanted = plans[best] if gain > MIN_GAIN * float(scores_K[kept]) else None
    again = wanted is not None and past.wanted is not None and _same_way(plans[kept], wanted, past.wanted)
    held = 0 if wanted is None else past.held + 1 if again else 1
    gained = 0.0 if wanted is None else past.gained_seconds + gain if again else gain
    at_once = gain > max(price, AT_ONCE * float(scores_K[kept])) and past.held >= 0
    memory = Memory(wanted=wanted, held=held, gained_seconds=gained, behind_seconds=behind)
    return memory, at_once or (held >= 2 and gained > price) or behind > price


def _same_way(current: Plan, wanted: Plan, before: Plan) -> bool:
    """Return whether two wanted plans agree in direction. Their exact numbers vary by chance."""
    if wanted.mode != before.mode or current.mode == "colocated":
        return wanted.mode == before.mode
    return (wanted.rollout > current.rollout) == (before.rollout > current.rollout)


def _decide_first(inputs: PlanInputs, cast: Forecast, best: int, scores_K: NDArray[np.float64]) -> Decision:
    if not (inputs.rollout.measured and inputs.scoring.measured):
        return _decide_unmeasured(cast)
    plan, seconds = cast.plans[best], float(cast.seconds_KB[best].mean())
    other = [k for k in range(len(cast.plans)) if (cast.plans[k].mode == "split") != (plan.mode == "split")]
    rival = ""
    if other:
        second = min(other, key=lambda k: float(scores_K[k]))
        name = "taking turns" if cast.plans[second].mode == "colocated" else "the best split"
        rival = f", {name} {cast.seconds_KB[second].mean():.1f} s"
    reason = f"{describe_plan(plan)}: predicted {seconds:.1f} s{rival}"
    memory = Memory(held=-1, predicted_seconds=seconds)
    return Decision(plan=plan, predicted_seconds=seconds, unchanged_seconds=seconds, reason=reason, memory=memory)


def _decide_unmeasured(cast: Forecast) -> Decision:
    """Take turns before the first measurement.

    A split from assumed speeds can be many times slower than taking turns, but taking turns cannot be many times slower
    than a split.
    """
    plan, seconds = cast.plans[0], float(cast.seconds_KB[0].mean())
    reason = f"nothing is measured yet, so {describe_plan(plan)}: estimated {seconds:.1f} s from default speeds"
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
            f"{describe_change(current, plan)}: predicted {stage:.1f} s instead of {unchanged_seconds:.1f} s, "
            f"plus {cost:.1f} s once for the move"
        )
        memory = Memory(held=-1)
    else:
        seconds, plan = unchanged_seconds, current
        reason = f"kept {short_label(current)}: {_why_kept(memory, float(scores_K[kept] - scores_K[best]), cost)}"
    memory = memory.model_copy(update={"predicted_seconds": seconds})
    return Decision(
        plan=plan, predicted_seconds=seconds, unchanged_seconds=unchanged_seconds, reason=reason, memory=memory
    )


def _why_kept(memory: Memory, gain: float, cost: float) -> str:
    if memory.wanted is not None:
        return f"{short_label(memory.wanted)} would save {gain:.1f} s and is used if the next prediction agrees"
    if gain <= 0:
        return "no other plan is predicted to be faster"
    return f"the best change would save {gain:.1f} s, but the move costs {cost:.1f} s"


def correct_plan(inputs: DrainInputs, *, bootstraps: int, risk: float) -> Decision:
    """Return the plan with workers moved if the predicted gain exceeds 10% and S, else the current plan.

    S is the cost of moving. Each worker moves at most once in a stage (`movable_*`), and moves are at least 2 S apart.
    If predictions after a move were off by 30% twice in a row, the plan is no longer changed. These limits do not apply
    to workers with a permanently empty queue: their move to the other role is part of the plan, if it is predicted to
    be faster.
    """
    if inputs.plan.mode == "colocated":
        return unchanged(inputs, "roles take turns, so no worker is moved during a stage")
    emptied = inputs.rollout.waiting + inputs.rollout.coming == 0
    if inputs.elapsed_seconds < inputs.memory.look_at and emptied == inputs.memory.emptied:
        return unchanged(inputs, f"the next evaluation is {inputs.memory.look_at:.1f} s after the start")
    moves = _moves(inputs)
    seconds_KB = remaining(inputs, moves, bootstraps=bootstraps)
    scores_K = scores(seconds_KB, risk=risk)
    kept = moves.index(0)
    as_good = [k for k in range(len(moves)) if scores_K[k] <= (1 + TIE) * scores_K.min()]
    # Of almost equal moves the smallest is best. Of handovers the largest is best: workers with nothing left to
    # generate lose nothing, and workers that stay would wait until the others have moved.
    best = max(as_good) if emptied and kept not in as_good else min(as_good, key=lambda k: abs(moves[k]))
    seconds = float(seconds_KB[kept].mean())
    memory = _remember(inputs, seconds)
    gain = float(scores_K[kept] - scores_K[best])
    held_back = _reason_against_move(inputs, memory, gain, float(scores_K[kept]), move=moves[best])
    if held_back:
        return unchanged(
            inputs, f"kept {inputs.plan.rollout}/{inputs.plan.scoring}: {held_back}", seconds=seconds, memory=memory
        )
    return _decide_move(inputs, moves[best], float(seconds_KB[best].mean()), seconds, memory)


def _moves(inputs: DrainInputs) -> list[int]:
    """Return the amounts of slots that may be moved, in steps of whole workers of both roles. Positive: to scoring."""
    step = lcm(inputs.rollout.demand.slots, inputs.scoring.demand.slots)
    to_scoring = _amounts(min(inputs.movable_rollout, _spare(inputs.rollout, inputs.plan.rollout)), step)
    to_rollout = _amounts(min(inputs.movable_scoring, _spare(inputs.scoring, inputs.plan.scoring)), step)
    return [*(-amount for amount in reversed(to_rollout)), 0, *to_scoring]


def _spare(role: RoleProgress, planned: int) -> int:
    """Return the number of slots that the role can give away.

    These are all slots if no unit waits or will come, else all but the role's minimum.
    """
    minimum = max(role.demand.least_slots, role.demand.slots) if role.waiting + role.coming else 0
    return min(role.slots, planned) - minimum


def _amounts(maximum: int, step: int) -> list[int]:
    """Return every multiple of the step up to `maximum`, or `MOVES` of them in geometric spacing if there are more."""
    count = max(maximum, 0) // step
    if count <= MOVES:
        return [step * (number + 1) for number in range(count)]
    return sorted({step * round(amount) for amount in np.geomspace(1, count, MOVES)})


def _remember(inputs: DrainInputs, seconds: float) -> Memory:
    """Return the updated state. Count a miss if the predicted end of the stage changed by 30% since the last decision.

    Misses are counted only after workers were moved. Before, an error means that the load has changed, which is the
    reason for corrections.
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


def _reason_against_move(inputs: DrainInputs, memory: Memory, gain: float, score: float, *, move: int) -> str:
    """Return the reason why the best move is not made, or "" if it is made."""
    cost = inputs.resize.mean_seconds
    source = inputs.rollout if move > 0 else inputs.scoring
    if move == 0 or gain <= 0:
        return "no move is predicted to save time"
    if source.waiting + source.coming == 0:  # a planned handover
        return ""
    price = max(MIN_MOVE_GAIN * score, cost)
    if memory.misses >= MISSES:
        return "two predictions were wrong by more than 30%, so the plan stays the same"
    if inputs.elapsed_seconds - memory.moved_at < DWELL * cost:
        return f"workers were moved {inputs.elapsed_seconds - memory.moved_at:.1f} s ago"
    if gain <= price:
        return f"the best move would save {gain:.1f} s, less than the required {price:.1f} s"
    return ""


def _decide_move(inputs: DrainInputs, move: int, seconds: float, unmoved: float, memory: Memory) -> Decision:
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
