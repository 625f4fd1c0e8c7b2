"""From a placement's configuration to the policy that decides; those that users bring are named `pkg.mod:Class`."""

import inspect
from typing import cast

from infra.errors import BadInput
from infra.plugins import find_target, nearest_name
from placement.config import (
    AdaptivePlacement,
    ColocatedPlacement,
    FixedPlacement,
    PlacementConfig,
    ProportionalPlacement,
    TargetPlacement,
)
from placement.policies.adaptive import Adaptive
from placement.policies.simple import Colocated, Fixed, Proportional
from placement.records import Policy


def target_policy(config: TargetPlacement) -> Policy:
    """Import a user's class, make an object of it with the options, and prove that it plans and drains."""
    where = f"placement target {config.target!r}"
    found = find_target(config.target, where=where)
    if not inspect.isclass(found):
        raise BadInput(f"{where}: expected a class with plan(inputs) and drain(inputs), found {found!r}")
    try:
        policy = found(**config.options)
    except Exception as error:  # whatever a user's class raises means that it cannot be used
        wanted = ", ".join(f"{name}=…" for name in config.options)
        raise BadInput(f"{where}: making it with ({wanted}) failed: {type(error).__name__}: {error}") from error
    for method in ("plan", "drain"):
        _check_method(policy, method, where)
    return cast(Policy, policy)


def _check_method(policy: object, name: str, where: str) -> None:
    method = getattr(policy, name, None)
    if not callable(method) or inspect.iscoroutinefunction(method):
        near = nearest_name(name, (known for known in dir(policy) if not known.startswith("_")))
        raise BadInput(f"{where}: expected a method {name}(inputs) that returns a Decision, found {method!r}{near}")
    try:
        inspect.signature(method).bind("inputs")
    except TypeError as error:
        found = inspect.signature(method)
        raise BadInput(f"{where}: expected to call {name}(inputs), found {name}{found}: {error}") from error


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
