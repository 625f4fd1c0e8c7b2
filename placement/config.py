"""Configuration of placement: which workers serve which role. Results do not depend on it."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from infra.config import Settings


class PlacementPolicy(Settings):
    """What all policies share."""

    replicas: dict[str, Annotated[int, Field(ge=1)]] = {}
    """Replicas of served rewards, by term, that are fixed; the others share what is left, largest replica first."""


class ColocatedPlacement(PlacementPolicy):
    """Roles take turns on all workers: rollout, then scoring, then update."""

    kind: Literal["colocated"] = "colocated"


class FixedPlacement(PlacementPolicy):
    """Rollout and scoring side by side, always on the same split."""

    kind: Literal["fixed"] = "fixed"
    rollout: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of the workers that generate."""


class ProportionalPlacement(PlacementPolicy):
    """Side by side, split as the busy seconds of the iterations before (EMA 0.7)."""

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


class TargetPlacement(PlacementPolicy):
    """Any class that fits `placement.policies.protocol.Policy`."""

    kind: Literal["target"] = "target"
    target: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]
    """`pkg.mod:Class`."""
    options: dict[str, JsonValue] = {}
    """Keyword arguments of the class."""


PlacementConfig = Annotated[
    ColocatedPlacement | FixedPlacement | ProportionalPlacement | AdaptivePlacement | TargetPlacement,
    Field(discriminator="kind"),
]
