"""The boundary between whoever runs stages and whoever decides: real pools and the simulator ask the same objects."""

from typing import Protocol

from placement.records import Decision, DrainInputs, PlanInputs


class Policy(Protocol):
    """Decides from its inputs alone: the same inputs give the same decision."""

    def plan(self, inputs: PlanInputs) -> Decision:
        """Deal the slots for the coming stage."""

    def drain(self, inputs: DrainInputs) -> Decision:
        """Correct the deal inside a stage; policies that do not return the plan as it is."""
