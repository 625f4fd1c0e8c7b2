"""Configuration of placement: which workers serve which role. Results do not depend on it."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue

from infra.config import Settings


class PlacementPolicy(Settings):
    """What all policies share."""

    takes_turns: ClassVar[bool] = True
    """Whether roles may take turns; otherwise rollout needs a slot beside those of the reward models."""

    replicas: dict[str, Annotated[int, Field(ge=1)]] = {}
    """Replicas of served rewards, by term, that are fixed; the others share what is left, largest replica first."""

    @property
    def corrects(self) -> bool:
        """Whether it may move workers inside a stage."""
        return False

    def standing(self) -> Self:
        """The same policy where nobody can correct a plan inside a stage."""
        return self


class ColocatedPlacement(PlacementPolicy):
    """Roles take turns on all workers: rollout, then scoring, then update."""

    kind: Literal["colocated"] = "colocated"


class FixedPlacement(PlacementPolicy):
    """Rollout and scoring side by side, always on the same split."""

    takes_turns = False

    kind: Literal["fixed"] = "fixed"
    rollout: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of the workers that generate."""


class ProportionalPlacement(PlacementPolicy):
    """Side by side, split as the busy seconds of the iterations before (EMA 0.7)."""

    takes_turns = False

    kind: Literal["proportional"] = "proportional"


class AdaptivePlacement(PlacementPolicy):
    """Plan between stages and correct inside them, from measured step times, lengths and costs of moving."""

    kind: Literal["adaptive"] = "adaptive"
    bootstraps: Annotated[int, Field(ge=8, le=64)] = 16
    """Resamples of recent lengths by which a candidate is judged."""
    risk: Annotated[float, Field(ge=0)] = 0.25
    """Weight of the mean of the worst quarter of the resamples beside the mean of all."""
    threshold: Annotated[float, Field(ge=0)] = 1.0
    """A change must gain more than so many times its cost, twice in a row, or 25% at once."""
    drain: bool = True
    """Move workers inside a stage too."""

    @property
    def corrects(self) -> bool:
        """If it may."""
        return self.drain

    def standing(self) -> Self:
        """The plan between stages alone."""
        return self.model_copy(update={"drain": False})


class TargetPlacement(PlacementPolicy):
    """Any class that fits `placement.records.Policy`."""

    kind: Literal["target"] = "target"
    target: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]
    """`pkg.mod:Class`."""
    options: dict[str, JsonValue] = {}
    """Keyword arguments of the class."""

    @property
    def corrects(self) -> bool:
        """It is asked, and may leave the plan as it is."""
        return True


PlacementConfig = Annotated[
    ColocatedPlacement | FixedPlacement | ProportionalPlacement | AdaptivePlacement | TargetPlacement,
    Field(discriminator="kind"),
]
