"""The decision to do what the configuration says, whatever was measured."""

from placement.prediction import forecast
from placement.records import Decision, Plan, PlanInputs

BOOTSTRAPS = 8
"""Resamples behind the prediction that is reported."""


def as_configured(inputs: PlanInputs, plan: Plan, what: str) -> Decision:
    """Decide for a plan, and predict it."""
    seconds = float(forecast(inputs, (plan,), bootstraps=BOOTSTRAPS).seconds_KB.mean())
    return Decision(
        plan=plan,
        predicted_seconds=seconds,
        unchanged_seconds=seconds,
        reason=f"{what}, as configured: predicted {seconds:.1f} s",
        memory=inputs.memory.model_copy(update={"predicted_seconds": seconds}),
    )
