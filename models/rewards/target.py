"""Rewards that users bring, named `pkg.mod:function`."""

import functools
import inspect
from collections.abc import Callable

from infra.errors import BadInput
from infra.plugins import find_target
from models.protocols import Reward
from models.rewards.config import TargetReward


def target_reward(config: TargetReward) -> Reward:
    """Import a user's reward and prove that it takes (prompt, completion, answer, **options)."""
    where = f"reward target {config.target!r}"
    found = find_target(config.target, where=where)
    if not callable(found) or inspect.iscoroutinefunction(found):
        raise BadInput(f"{where}: expected a function that returns a float, found {found!r}")
    _check_signature(found, config, where)
    return functools.partial(found, **config.options)


def _check_signature(function: Callable[..., object], config: TargetReward, where: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-ins do not tell; the call itself will
        return
    try:
        signature.bind("prompt", "completion", "answer", **config.options)
    except TypeError as error:
        wanted = ", ".join(("prompt", "completion", "answer", *(f"{name}=…" for name in config.options)))
        raise BadInput(f"{where}: expected to call it with ({wanted}), found {signature}: {error}") from error
