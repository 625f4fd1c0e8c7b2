"""Roles take turns on all workers."""

from dataclasses import dataclass

from placement.configured import as_configured
from placement.records import Decision, DrainInputs, PlanInputs
from placement.splits import turns
from placement.unchanged import unchanged


@dataclass(frozen=True, slots=True)
class Colocated:
    """Rollout on all workers, then scoring on all workers."""

    def plan(self, inputs: PlanInputs) -> Decision:
        return as_configured(inputs, turns(inputs), f"roles take turns on all {inputs.workers} workers")

    def drain(self, inputs: DrainInputs) -> Decision:
        return unchanged(inputs, "roles take turns: nothing to move inside a stage")
