"""Configuration of placement: which workers serve which role. Placement does not affect the results of a run."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue

from infra.config import Settings


class PlacementPolicy(Settings):
    """Settings that all placement policies share."""

    takes_turns: ClassVar[bool] = True
    """Whether roles may take turns. If not, rollout needs slots in addition to those of the reward models."""

    replicas: dict[str, Annotated[int, Field(ge=1)]] = {}
    """Fixed numbers of replicas of served rewards, by term. The other rewards share the remaining slots, largest
    replica first."""

    @property
    def corrects(self) -> bool:
        """Whether the policy can move workers during a stage."""
        return False

    def standing(self) -> Self:
        """Return the same policy without corrections during a stage."""
        return self


class ColocatedPlacement(PlacementPolicy):
    """Placement in which roles take turns on all workers: rollout, then scoring, then update."""

    kind: Literal["colocated"] = "colocated"


class FixedPlacement(PlacementPolicy):
    """Placement of rollout and scoring side by side, with the same split of the workers in all iterations."""

    takes_turns = False

    kind: Literal["fixed"] = "fixed"
    rollout: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of the workers that generate."""


class ProportionalPlacement(PlacementPolicy):
    """Placement side by side, split in proportion to the busy seconds of earlier iterations (EMA 0.7)."""

    takes_turns = False

    kind: Literal["proportional"] = "proportional"


class AdaptivePlacement(PlacementPolicy):
    """Placement by predictions from measured times and lengths: plans between stages, and corrections during them."""

    kind: Literal["adaptive"] = "adaptive"
    bootstraps: Annotated[int, Field(ge=8, le=64)] = 16
    """Number of bootstrap resamples of recent lengths with which each plan is evaluated."""
    risk: Annotated[float, Field(ge=0)] = 0.25
    """Weight of the mean over the worst quarter of the resamples, relative to the mean over all resamples."""
    threshold: Annotated[float, Field(ge=0)] = 1.0
    """Minimum gain of a change, as a multiple of its cost, summed over at least two stages in a row. A gain of more
    than 25% of the stage is enough at once."""
    drain: bool = True
    """Whether to move workers during a stage too."""

    @property
    def corrects(self) -> bool:
        """Whether corrections during a stage are switched on."""
        return self.drain

    def standing(self) -> Self:
        """Return the same policy with plans between stages only."""
        return self.model_copy(update={"drain": False})


class TargetPlacement(PlacementPolicy):
    """Placement by a class of the user that implements `placement.records.Policy`."""

    kind: Literal["target"] = "target"
    target: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]
    """Import path of the class: `pkg.mod:Class`."""
    options: dict[str, JsonValue] = {}
    """Keyword arguments of the class."""

    @property
    def corrects(self) -> bool:
        """Always true: the class decides during stages too, and may return the current plan."""
        return True


PlacementConfig = Annotated[
    ColocatedPlacement | FixedPlacement | ProportionalPlacement | AdaptivePlacement | TargetPlacement,
    Field(discriminator="kind"),
]
