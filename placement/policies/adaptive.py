"""Adaptive placement policy, which decides from measured speeds and sequence lengths.

Before each stage the policy chooses the plan with the shortest predicted time. While the stage runs, it predicts when
each role will finish, and moves workers to the role that would finish last.

Shapes: K candidate plans, B bootstrap resamples.
"""

from dataclasses import dataclass
from math import lcm

import numpy as np
from numpy.typing import NDArray

from rheostat.placement.config import AdaptivePlacement
from rheostat.placement.forecast.remaining import predict_remaining
from rheostat.placement.forecast.stage import Forecast, forecast, score_plans
from rheostat.placement.policies.simple import keep_plan
from rheostat.placement.records import (
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
from rheostat.placement.slots import find_current_plan, list_candidates

TIE_MARGIN = 0.02
"""Maximum relative difference for which two predictions are treated as equal."""
IMMEDIATE_GAIN = 0.25
"""Minimum gain, as a fraction of the stage time, for changing the plan immediately instead of waiting for a second
stage."""
MIN_GAIN = 0.01
"""Minimum gain, as a fraction of the stage time. Smaller predicted gains are ignored, because they are within the
prediction error."""
MIN_MOVE_GAIN = 0.10
"""Minimum predicted gain for moving workers during a stage, as a fraction of the remaining time. The gain must also
exceed the cost of the move."""
MIN_MOVE_INTERVAL = 2.0
"""Minimum time between two moves of workers, as a multiple of the time that a move takes."""
MISS_ERROR = 0.30
"""Minimum relative error for which a prediction counts as a miss. After `MAX_MISSES` consecutive misses, no more
workers are moved in the stage."""
MAX_MISSES = 2
"""Number of consecutive misses (wrong predictions) after which no more workers are moved in a stage."""
EVALUATION_INTERVAL = 0.04
"""Time between two evaluations of the plan during a stage, as a fraction of the stage time. Within less time,
predictions hardly change."""
MAX_AMOUNTS = 8
"""Maximum number of candidate moves (numbers of slots) that are evaluated in each direction."""


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Placement policy that chooses the plan with the shortest predicted time, if the gain is worth the cost of
    changing.

    Let S be the time that moving a worker takes. This cost is paid once, while the gain recurs in every stage. The plan
    is changed if the same change was predicted to be faster in at least two consecutive stages, and if the total gain
    in these stages exceeds threshold × S. If the gain exceeds 25% of the stage, the plan is changed immediately, except
    in the stage after another change. Therefore inputs that alternate between two states change the plan in at most
    every second stage.

    If workers may be moved during a stage, the predicted time of a split includes the handover: rollout workers move to
    scoring as soon as no rollout units are left. Most splits are then faster than taking turns, because with taking
    turns no worker can score before all workers have finished rollout.

    Taking turns is always a candidate, which limits the loss from wrong decisions. If a split has been slower than
    taking turns by a total of more than threshold × S since the last change, the policy changes back immediately.
    Therefore the total predicted time of any number of stages is at most the time with taking turns + threshold × S ×
    (changes + 1), plus S × changes for moving workers.
    """

    config: AdaptivePlacement
    """Settings of the policy."""

    def plan(self, inputs: PlanInputs) -> Decision:
        plans = list_candidates(inputs)
        cast = forecast(inputs, plans, bootstraps=self.config.bootstraps, handover=self.config.drain)
        scores_K = score_plans(cast.seconds_KB, risk=self.config.risk)
        best, current = _prefer_few_rollout_slots(plans, scores_K), find_current_plan(inputs)
        if current is None:
            return _decide_first(inputs, cast, best, scores_K)
        kept = plans.index(current)
        memory, pays = _weigh(inputs, self.config, plans, scores_K, kept=kept, best=best)
        return _decide(inputs, cast, memory, pays, kept=kept, best=best, scores_K=scores_K)

    def drain(self, inputs: DrainInputs) -> Decision:
        if not self.config.drain:
            return keep_plan(inputs, "moves during a stage are switched off (placement.drain)")
        return correct_plan(inputs, bootstraps=self.config.bootstraps, risk=self.config.risk)


def _prefer_few_rollout_slots(plans: tuple[Plan, ...], scores_K: NDArray[np.float64]) -> int:
    """Return the index of the preferred plan: among almost equally good splits, the one with the fewest rollout slots.

    If taking turns has the best score, its index is returned. Otherwise, splits with a score within 2% of the best are
    considered, except those that are worse than taking turns.
    """
    lowest, tie = float(scores_K.min()), float(scores_K.min()) * (1 + TIE_MARGIN)
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
    """Return the state to store if the plan is not changed, and whether a change of the plan is worth its cost."""
    price = config.threshold * inputs.resize.mean_seconds
    gain, past = float(scores_K[kept] - scores_K[best]), inputs.memory
    behind = max(0.0, past.behind_seconds + float(scores_K[kept] - scores_K[0]))
    wanted = plans[best] if gain > MIN_GAIN * float(scores_K[kept]) else None
    again = wanted is not None and past.wanted is not None and _same_way(plans[kept], wanted, past.wanted)
    held = 0 if wanted is None else past.held + 1 if again else 1
    gained = 0.0 if wanted is None else past.gained_seconds + gain if again else gain
    at_once = gain > max(price, IMMEDIATE_GAIN * float(scores_K[kept])) and past.held >= 0
    memory = Memory(wanted=wanted, held=held, gained_seconds=gained, behind_seconds=behind)
    return memory, at_once or (held >= 2 and gained > price) or behind > price


def _same_way(current: Plan, wanted: Plan, before: Plan) -> bool:
    """Return whether two preferred plans change the current plan in the same direction.

    Their exact numbers of slots are not compared, because the numbers vary by chance.
    """
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
    """Return the decision before the first measurement, which is to take turns.

    A split that is computed from assumed speeds can be many times slower than taking turns, but taking turns cannot be
    many times slower than a split. Therefore taking turns is the safe choice.
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
    """Decide whether to move workers to the other role while a stage runs.

    Let S be the time that moving a worker takes. Workers are moved if the predicted gain exceeds both S and 10% of the
    remaining time. Each worker moves at most once in a stage (`movable_*`), and two moves are at least 2 S apart. If
    predictions after a move were wrong by 30% twice in a row, no more workers are moved. These limits do not apply to
    workers whose role has no units left. Such workers are moved whenever the move is predicted to be faster.
    """
    if inputs.plan.mode == "colocated":
        return keep_plan(inputs, "roles take turns, so no worker is moved during a stage")
    emptied = inputs.rollout.waiting + inputs.rollout.coming == 0
    if inputs.elapsed_seconds < inputs.memory.look_at and emptied == inputs.memory.emptied:
        return keep_plan(inputs, f"the next evaluation is {inputs.memory.look_at:.1f} s after the start")
    moves = _moves(inputs)
    seconds_KB = predict_remaining(inputs, moves, bootstraps=bootstraps)
    scores_K = score_plans(seconds_KB, risk=risk)
    kept = moves.index(0)
    as_good = [k for k in range(len(moves)) if scores_K[k] <= (1 + TIE_MARGIN) * scores_K.min()]
    # If several moves have almost the same prediction, the smallest is best. If the source role has no units left, the
    # largest is best: its workers have nothing else to do, and could only move after this move is complete.
    best = max(as_good) if emptied and kept not in as_good else min(as_good, key=lambda k: abs(moves[k]))
    seconds = float(seconds_KB[kept].mean())
    memory = _remember(inputs, seconds)
    gain = float(scores_K[kept] - scores_K[best])
    held_back = _reason_against_move(inputs, memory, gain, float(scores_K[kept]), move=moves[best])
    if held_back:
        return keep_plan(
            inputs, f"kept {inputs.plan.rollout}/{inputs.plan.scoring}: {held_back}", seconds=seconds, memory=memory
        )
    return _decide_move(inputs, moves[best], float(seconds_KB[best].mean()), seconds, memory)


def _moves(inputs: DrainInputs) -> list[int]:
    """Return the numbers of slots that could be moved, in multiples of whole workers of both roles.

    Positive numbers move slots to scoring, negative numbers to rollout.
    """
    step = lcm(inputs.rollout.demand.slots, inputs.scoring.demand.slots)
    to_scoring = _amounts(min(inputs.movable_rollout, _spare(inputs.rollout, inputs.plan.rollout)), step)
    to_rollout = _amounts(min(inputs.movable_scoring, _spare(inputs.scoring, inputs.plan.scoring)), step)
    return [*(-amount for amount in reversed(to_rollout)), 0, *to_scoring]


def _spare(role: RoleProgress, planned: int) -> int:
    """Return the number of slots that can be moved from a role to the other role.

    If the role has no more units to start, all of its slots can be moved. Otherwise the role keeps its minimum number
    of slots.
    """
    minimum = max(role.demand.least_slots, role.demand.slots) if role.waiting + role.coming else 0
    return min(role.slots, planned) - minimum


def _amounts(maximum: int, step: int) -> list[int]:
    """Return the multiples of `step` up to `maximum`.

    If there are more than `MAX_AMOUNTS` multiples, return `MAX_AMOUNTS` of them, with geometric spacing.
    """
    count = max(maximum, 0) // step
    if count <= MAX_AMOUNTS:
        return [step * (number + 1) for number in range(count)]
    return sorted({step * round(amount) for amount in np.geomspace(1, count, MAX_AMOUNTS)})


def _remember(inputs: DrainInputs, seconds: float) -> Memory:
    """Return the state of the policy, updated with the result of the last prediction.

    The last prediction counts as a miss if the predicted end of the stage has changed by 30% since then. Misses are
    counted only after workers were moved. Before a move, a wrong prediction means that the load has changed, and moving
    workers is the right reaction.
    """
    expected, end = inputs.memory.predicted_seconds, inputs.elapsed_seconds + seconds
    missed = expected is not None and abs(end - expected) > MISS_ERROR * expected and inputs.memory.moved > 0
    misses = inputs.memory.misses
    misses = misses if misses >= MAX_MISSES else misses + 1 if missed else 0
    update = {
        "misses": misses,
        "predicted_seconds": end,
        "look_at": inputs.elapsed_seconds + EVALUATION_INTERVAL * end,
        "emptied": inputs.rollout.waiting + inputs.rollout.coming == 0,
    }
    return inputs.memory.model_copy(update=update)


def _reason_against_move(inputs: DrainInputs, memory: Memory, gain: float, score: float, *, move: int) -> str:
    """Return the reason why the best move is not made, or "" if it is made."""
    cost = inputs.resize.mean_seconds
    source = inputs.rollout if move > 0 else inputs.scoring
    if move == 0 or gain <= 0:
        return "no move is predicted to save time"
    if source.waiting + source.coming == 0:  # a handover: the source role has no units left
        return ""
    price = max(MIN_MOVE_GAIN * score, cost)
    if memory.misses >= MAX_MISSES:
        return "two predictions were wrong by more than 30%, so the plan stays the same"
    if inputs.elapsed_seconds - memory.moved_at < MIN_MOVE_INTERVAL * cost:
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
