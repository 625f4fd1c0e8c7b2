"""Creation of placement policies from their configuration, including user-defined classes (`pkg.mod:Class`)."""

import inspect
from typing import cast

from rheostat.infra.errors import BadInput
from rheostat.infra.plugins import find_target, nearest_name
from rheostat.placement.config import (
    AdaptivePlacement,
    ColocatedPlacement,
    FixedPlacement,
    PlacementConfig,
    ProportionalPlacement,
    TargetPlacement,
)
from rheostat.placement.policies.adaptive import Adaptive
from rheostat.placement.policies.simple import Colocated, Fixed, Proportional
from rheostat.placement.records import Policy


def target_policy(config: TargetPlacement) -> Policy:
    """Import a user-defined class, instantiate it with its options, and check that it has the methods `plan` and
    `drain`.

    Raises `BadInput` if the class cannot be imported or constructed, or if a method is missing.
    """
    where = f"placement target {config.target!r}"
    policy_class = find_target(config.target, where=where)
    if not inspect.isclass(policy_class):
        raise BadInput(
            f"{where} must be a class with the methods plan(inputs) and drain(inputs), found {policy_class!r}"
        )
    try:
        policy = policy_class(**config.options)
    except Exception as error:  # a user-defined class may raise any exception
        options = ", ".join(f"{name}=…" for name in config.options)
        raise BadInput(
            f"{where}: creating an object of the class with the options ({options}) failed: {type(error).__name__}: "
            f"{error}. Correct placement.options or the class."
        ) from error
    for method in ("plan", "drain"):
        _check_method(policy, method, where)
    return cast(Policy, policy)


def _check_method(policy: object, name: str, where: str) -> None:
    method = getattr(policy, name, None)
    if not callable(method) or inspect.iscoroutinefunction(method):
        near = nearest_name(name, (known for known in dir(policy) if not known.startswith("_")))
        raise BadInput(
            f"{where}: the class must have a method {name}(inputs) that returns a Decision, found {method!r}{near}"
        )
    try:
        inspect.signature(method).bind("inputs")
    except TypeError as error:
        signature = inspect.signature(method)
        raise BadInput(
            f"{where}: the method {name} must accept one argument, inputs, but its signature is {name}{signature}: "
            f"{error}"
        ) from error


def build_policy(config: PlacementConfig) -> Policy:
    """Return the configured placement policy. Raises `BadInput` if a user-defined class cannot be used."""
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
