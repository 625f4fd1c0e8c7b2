"""Rewards that users bring, named `pkg.mod:function`."""

import difflib
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from types import ModuleType

from infra.errors import BadInput
from models.protocols import Reward
from models.rewards.config import TargetReward


def target_reward(config: TargetReward) -> Reward:
    """Import a user's reward and prove that it takes (prompt, completion, answer, **options)."""
    module_name, _, path = config.target.partition(":")
    where = f"reward target {config.target!r}"
    found = _attribute(_module(module_name, where), path, where)
    if not callable(found) or inspect.iscoroutinefunction(found):
        raise BadInput(f"{where}: expected a function that returns a float, found {found!r}")
    _check_signature(found, config, where)
    return functools.partial(found, **config.options)


def _module(name: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise BadInput(f"{where}: its module needs {error.name!r}, which is not installed") from error
        raise BadInput(f"{where}: no module {error.name!r}{_nearest(error.name, _siblings(error.name))}") from error
    except (Exception, SystemExit) as error:  # whatever a user's module raises means that it cannot be used
        raise BadInput(f"{where}: importing it failed: {type(error).__name__}: {error}") from error


def _attribute(module: ModuleType, path: str, where: str) -> object:
    found: object = module
    for name in path.split("."):
        if not hasattr(found, name):
            raise BadInput(f"{where}: no attribute {name!r} in {found!r}{_nearest(name, dir(found))}")
        found = getattr(found, name)
    return found


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


def _siblings(name: str) -> Iterable[str]:
    parent, _, _ = name.rpartition(".")
    if not parent:
        return (module.name for module in pkgutil.iter_modules())
    folders = getattr(importlib.import_module(parent), "__path__", ())
    return (f"{parent}.{module.name}" for module in pkgutil.iter_modules(folders))


def _nearest(name: str, candidates: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(candidates), n=1)
    return f", did you mean {near[0]!r}?" if near else ""
