"""Split as the busy seconds of the iterations before: round_q(G · w_r / Σw), as WeChat-YATT's text suggests."""

from dataclasses import dataclass

from placement.reasons import changed, short
from placement.records import Decision, DrainInputs, Plan, PlanInputs
from placement.splits import nearest_split, standing
from placement.unchanged import unchanged

LEAST_GAIN = 0.10
"""Moves are made when the expected makespan, the cost of moving included, improves by more than this."""


@dataclass(frozen=True, slots=True)
class Proportional:
    """Side by side; the split follows the measured work of each role, half and half before the first measurement."""

    def plan(self, inputs: PlanInputs) -> Decision:
        busy = inputs.rollout.busy_seconds, inputs.scoring.busy_seconds
        known = min(busy) > 0
        share = busy[0] / sum(busy) if known else 0.5
        target, current = nearest_split(inputs, inputs.workers * share), standing(inputs)
        seconds = _makespan(inputs, target)
        if current is None or current.mode == "colocated":
            why = (
                f"as {busy[0]:.0f} to {busy[1]:.0f} busy seconds" if known else "half and half: nothing is measured yet"
            )
            return _decide(inputs, target, seconds, f"split {short(target)} {why}: predicted {seconds:.1f} s")
        kept = _makespan(inputs, current)
        cost = inputs.resize.mean_seconds
        if target == current or not seconds + cost < (1 - LEAST_GAIN) * kept:
            reason = (
                f"kept {short(current)}: {short(target)} would take {seconds:.1f} s + {cost:.1f} s, not {kept:.1f} s"
            )
            return _decide(inputs, current, kept, reason)
        reason = f"{changed(current, target)}: predicted {seconds:.1f} s instead of {kept:.1f} s"
        return _decide(inputs, target, seconds, reason, kept=kept)

    def drain(self, inputs: DrainInputs) -> Decision:
        return unchanged(inputs, "the split changes between stages only")


def _makespan(inputs: PlanInputs, plan: Plan) -> float:
    return max(inputs.rollout.busy_seconds / plan.rollout, inputs.scoring.busy_seconds / plan.scoring)


def _decide(inputs: PlanInputs, plan: Plan, seconds: float, reason: str, *, kept: float | None = None) -> Decision:
    return Decision(
        plan=plan,
        predicted_seconds=seconds,
        unchanged_seconds=seconds if kept is None else kept,
        reason=reason,
        memory=inputs.memory.model_copy(update={"predicted_seconds": seconds or None}),
    )
