"""Rewards that users bring, named `pkg.mod:function`."""

import functools
import inspect
from collections.abc import Callable
from typing import Final

from infra.errors import BadInput
from infra.plugins import find_target
from models.protocols import Reward
from models.rewards.config import TargetReward

PARTS: Final[dict[str, dict[str, list[str]]]] = {
    "completion": {},
    "step": {"steps": ["step"]},
    "token": {"tokens": ["token"]},
}
"""What a function is given beside the completion, by what it values."""


def target_reward(config: TargetReward) -> Reward:
    """Import a user's function and prove that it takes (prompt, completion, answer, **options), and steps or tokens."""
    where = f"reward target {config.target!r}"
    found = find_target(config.target, where=where)
    if not callable(found) or inspect.iscoroutinefunction(found):
        raise BadInput(f"{where}: expected a function that returns a float, or several, found {found!r}")
    _check_signature(found, config, where)
    return functools.partial(found, **config.options)


def _check_signature(function: Callable[..., object], config: TargetReward, where: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-ins do not tell; the call itself will
        return
    try:
        signature.bind("prompt", "completion", "answer", **PARTS[config.per], **config.options)
    except TypeError as error:
        named = (f"{name}=…" for name in (*PARTS[config.per], *config.options))
        wanted = ", ".join(("prompt", "completion", "answer", *named))
        raise BadInput(f"{where}: expected to call it with ({wanted}), found {signature}: {error}") from error
