"""Placement policies that do not compare predictions: taking turns, a fixed split, and a split in proportion to the
measured work of each role."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

from rheostat.placement.forecast.stage import forecast
from rheostat.placement.records import Decision, DrainInputs, Memory, Plan, PlanInputs, describe_change, short_label
from rheostat.placement.slots import build_turns_plan, find_current_plan, nearest_split

BOOTSTRAPS = 8
"""Number of bootstrap resamples from which the predicted time in a decision is computed."""


def decide_configured(inputs: PlanInputs, plan: Plan, what: str) -> Decision:
    """Return a decision for the given plan, with its predicted time. The reason of the decision describes the plan with
    the text `what`."""
    seconds = float(forecast(inputs, (plan,), bootstraps=BOOTSTRAPS).seconds_KB.mean())
    return Decision(
        plan=plan,
        predicted_seconds=seconds,
        unchanged_seconds=seconds,
        reason=f"{what}, as configured: predicted {seconds:.1f} s",
        memory=inputs.memory.model_copy(update={"predicted_seconds": seconds}),
    )


def keep_plan(
    inputs: DrainInputs, reason: str, *, seconds: float | None = None, memory: Memory | None = None
) -> Decision:
    """Return a decision that keeps the current plan.

    `seconds` is the predicted time to the end of the stage. By default the last prediction is used.
    """
    if seconds is None:
        expected = inputs.memory.predicted_seconds
        seconds = max(0.0, (expected or inputs.elapsed_seconds) - inputs.elapsed_seconds)
    return Decision(
        plan=inputs.plan,
        predicted_seconds=seconds,
        unchanged_seconds=seconds,
        reason=reason,
        memory=memory or inputs.memory,
    )


@dataclass(frozen=True, slots=True)
class Colocated:
    """Placement policy that uses all workers for rollout first, and then all workers for scoring."""

    def plan(self, inputs: PlanInputs) -> Decision:
        return decide_configured(inputs, build_turns_plan(inputs), f"roles take turns on all {inputs.workers} workers")

    def drain(self, inputs: DrainInputs) -> Decision:
        return keep_plan(inputs, "roles take turns, so no worker is moved during a stage")


@dataclass(frozen=True, slots=True)
class Fixed:
    """Placement policy that always uses the split whose fraction of rollout workers is closest to `rollout`."""

    rollout: float
    """Fraction of the workers that generate completions."""

    def plan(self, inputs: PlanInputs) -> Decision:
        plan = nearest_split(inputs, inputs.workers * self.rollout)
        return decide_configured(inputs, plan, f"split {plan.rollout}/{plan.scoring}")

    def drain(self, inputs: DrainInputs) -> Decision:
        return keep_plan(inputs, "the split is fixed")


MIN_GAIN = 0.10
"""Minimum improvement for changing the split, as a fraction of the expected time. The improvement is reduced by the
cost of moving workers."""


@dataclass(frozen=True, slots=True)
class Proportional:
    """Placement policy that splits the workers in proportion to the measured work of each role.

    Before the first measurement, each role gets half of the workers.
    """

    def plan(self, inputs: PlanInputs) -> Decision:
        busy = inputs.rollout.busy_seconds, inputs.scoring.busy_seconds
        is_measured = min(busy) > 0
        share = busy[0] / sum(busy) if is_measured else 0.5
        target, current = nearest_split(inputs, inputs.workers * share), find_current_plan(inputs)
        seconds = _makespan(inputs, target)
        if current is None or current.mode == "colocated":
            why = (
                f"in proportion to {busy[0]:.0f} and {busy[1]:.0f} busy seconds"
                if is_measured
                else "in half, because nothing is measured yet"
            )
            return _decide(inputs, target, seconds, f"split {short_label(target)} {why}: predicted {seconds:.1f} s")
        current_seconds = _makespan(inputs, current)
        cost = inputs.resize.mean_seconds
        if target == current or not seconds + cost < (1 - MIN_GAIN) * current_seconds:
            change = f"{short_label(target)} would take {seconds:.1f} s, plus {cost:.1f} s for the move"
            reason = f"kept {short_label(current)} with {current_seconds:.1f} s: {change}"
            return _decide(inputs, current, current_seconds, reason)
        reason = f"{describe_change(current, target)}: predicted {seconds:.1f} s instead of {current_seconds:.1f} s"
        return _decide(inputs, target, seconds, reason, kept=current_seconds)

    def drain(self, inputs: DrainInputs) -> Decision:
        return keep_plan(inputs, "the split changes only between stages")


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


_FORMER_NAMES: dict[str, Callable[..., Decision]] = {"as_configured": decide_configured, "unchanged": keep_plan}
"""Functions that users' policies may import under an old name, by old name."""


def __getattr__(name: str) -> Callable[..., Decision]:
    """Return the function with this old name, and print a deprecation warning."""
    if name not in _FORMER_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    function = _FORMER_NAMES[name]
    warnings.warn(
        f"{name} is deprecated and will be removed. Use {function.__name__} instead.", FutureWarning, stacklevel=2
    )
    return function
