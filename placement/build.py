"""From a placement's configuration to the policy that decides."""

from placement.adaptive import Adaptive
from placement.colocated import Colocated
from placement.config import (
    AdaptivePlacement,
    ColocatedPlacement,
    FixedPlacement,
    PlacementConfig,
    ProportionalPlacement,
    TargetPlacement,
)
from placement.fixed import Fixed
from placement.policies import Policy
from placement.proportional import Proportional
from placement.targets import target_policy


def build_policy(config: PlacementConfig) -> Policy:
    """Return the policy that the configuration names; `BadInput` where a target cannot be used."""
    match config:
        case ColocatedPlacement():
            return Colocated()
        case FixedPlacement():
            return Fixed(rollout=config.rollout)
        case ProportionalPlacement():
            return Proportional()
        case AdaptivePlacement():
            return Adaptive(config)
        case TargetPlacement():
            return target_policy(config)
