"""Roles take turns on all workers."""

from dataclasses import dataclass

from placement.prediction import forecast
from placement.records import Decision, DrainInputs, PlanInputs
from placement.splits import turns
from placement.unchanged import unchanged

BOOTSTRAPS = 8
"""Resamples behind the prediction that is reported."""


@dataclass(frozen=True, slots=True)
class Colocated:
    """Rollout on all workers, then scoring on all workers."""

    def plan(self, inputs: PlanInputs) -> Decision:
        plan = turns(inputs)
        seconds = float(forecast(inputs, (plan,), bootstraps=BOOTSTRAPS).seconds_KB.mean())
        return Decision(
            plan=plan,
            predicted_seconds=seconds,
            unchanged_seconds=seconds,
            reason=f"roles take turns on all {inputs.workers} workers, as configured: predicted {seconds:.1f} s",
            memory=inputs.memory.model_copy(update={"predicted_seconds": seconds}),
        )

    def drain(self, inputs: DrainInputs) -> Decision:
        return unchanged(inputs, "roles take turns: nothing to move inside a stage")
