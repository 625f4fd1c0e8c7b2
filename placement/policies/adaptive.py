"""Plan between stages and correct inside them, from what was measured."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.config import AdaptivePlacement
from placement.forecast.stage import Forecast, forecast, scores
from placement.policies.rebalance import drained
from placement.policies.simple import unchanged
from placement.records import Decision, DrainInputs, Memory, Plan, PlanInputs, changed, described, short
from placement.slots import candidates, standing

TIE = 0.02
"""Predictions that differ by less are as good as equal."""
AT_ONCE = 0.25
"""A gain of more than this share of the stage need not hold twice."""
LEAST_GAIN = 0.01
"""A gain of less than this share of the stage is within what predictions can tell."""


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
