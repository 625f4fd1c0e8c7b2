"""Rollout and scoring side by side, always on the same split."""

from dataclasses import dataclass

from placement.colocated import BOOTSTRAPS
from placement.prediction import forecast
from placement.records import Decision, DrainInputs, PlanInputs
from placement.splits import nearest_split
from placement.unchanged import unchanged


@dataclass(frozen=True, slots=True)
class Fixed:
    """The split whose share of rollout is nearest to the given one."""

    rollout: float

    def plan(self, inputs: PlanInputs) -> Decision:
        plan = nearest_split(inputs, inputs.workers * self.rollout)
        seconds = float(forecast(inputs, (plan,), bootstraps=BOOTSTRAPS).seconds_KB.mean())
        return Decision(
            plan=plan,
            predicted_seconds=seconds,
            unchanged_seconds=seconds,
            reason=f"split {plan.rollout}/{plan.scoring}, as configured: predicted {seconds:.1f} s",
            memory=inputs.memory.model_copy(update={"predicted_seconds": seconds}),
        )

    def drain(self, inputs: DrainInputs) -> Decision:
        return unchanged(inputs, "the split is fixed")
