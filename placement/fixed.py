"""Rollout and scoring side by side, always on the same split."""

from dataclasses import dataclass

from placement.configured import as_configured
from placement.records import Decision, DrainInputs, PlanInputs
from placement.splits import nearest_split
from placement.unchanged import unchanged


@dataclass(frozen=True, slots=True)
class Fixed:
    """The split whose share of rollout is nearest to the given one."""

    rollout: float

    def plan(self, inputs: PlanInputs) -> Decision:
        plan = nearest_split(inputs, inputs.workers * self.rollout)
        return as_configured(inputs, plan, f"split {plan.rollout}/{plan.scoring}")

    def drain(self, inputs: DrainInputs) -> Decision:
        return unchanged(inputs, "the split is fixed")
