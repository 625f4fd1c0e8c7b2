"""Configuration of placement, which decides which workers serve which role (rollout, scoring or update).

Placement affects the duration of a run, but not its results.
"""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue

from rheostat.infra.config import Settings


class PlacementPolicy(Settings):
    """Settings that all placement policies share."""

    can_take_turns: ClassVar[bool] = True
    """Whether rollout and scoring may use the same slots one after the other. If not, rollout needs slots in addition
    to those of the reward models."""

    replicas: dict[str, Annotated[int, Field(ge=1)]] = {}
    """Fixed number of replicas of each served reward model, by reward term. The other reward models share the remaining
    slots, starting with the model that needs the most slots per replica."""

    @property
    def can_move_workers(self) -> bool:
        """Whether the policy can move workers between roles while a stage runs."""
        return False

    def without_moves(self) -> Self:
        """Return a copy of the policy that moves no workers while a stage runs."""
        return self


class ColocatedPlacement(PlacementPolicy):
    """Placement in which all workers change roles together: rollout, then scoring, then update."""

    kind: Literal["colocated"] = "colocated"


class FixedPlacement(PlacementPolicy):
    """Placement in which rollout and scoring run at the same time, with a fixed split of the workers."""

    can_take_turns = False

    kind: Literal["fixed"] = "fixed"
    rollout: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Fraction of the workers that generate completions. The other workers score completions."""


class ProportionalPlacement(PlacementPolicy):
    """Placement in which rollout and scoring run at the same time. The workers are split in proportion to the time that
    each role was busy in earlier iterations (moving average with weight 0.7 for the old value)."""

    can_take_turns = False

    kind: Literal["proportional"] = "proportional"


class AdaptivePlacement(PlacementPolicy):
    """Placement that minimizes the predicted time of each stage. Predictions use the measured speeds and completion
    lengths. The policy plans before each stage, and can move workers while the stage runs."""

    kind: Literal["adaptive"] = "adaptive"
    bootstraps: Annotated[int, Field(ge=8, le=64)] = 16
    """Number of bootstrap resamples of recent completion lengths. Each plan is simulated once for every resample."""
    risk: Annotated[float, Field(ge=0)] = 0.25
    """Weight of the slowest 25% of the resamples in the score of a plan, relative to the mean over all resamples
    (weight 1)."""
    threshold: Annotated[float, Field(ge=0)] = 1.0
    """Minimum predicted gain for changing the plan, as a multiple of the cost of the change. Gains are summed over at
    least two consecutive stages. If the gain in one stage exceeds 25% of the stage time, the plan is changed
    immediately."""
    drain: bool = True
    """Whether workers can be moved between roles while a stage runs, in addition to planning before each stage."""

    @property
    def can_move_workers(self) -> bool:
        """Whether the policy may move workers while a stage runs."""
        return self.drain

    def without_moves(self) -> Self:
        """Return a copy of the policy that only plans before each stage."""
        return self.model_copy(update={"drain": False})


class TargetPlacement(PlacementPolicy):
    """Placement by a user-defined class that implements `rheostat.placement.records.Policy`."""

    kind: Literal["target"] = "target"
    target: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]
    """Import string of the class: `pkg.mod:Class`."""
    options: dict[str, JsonValue] = {}
    """Keyword arguments with which the class is instantiated."""

    @property
    def can_move_workers(self) -> bool:
        """Always true, because the method `drain` of the user's class is called while a stage runs. If `drain` returns
        the current plan, no workers are moved."""
        return True


PlacementConfig = Annotated[
    ColocatedPlacement | FixedPlacement | ProportionalPlacement | AdaptivePlacement | TargetPlacement,
    Field(discriminator="kind"),
]
