"""Policies that users bring, named `pkg.mod:Class`."""

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Iterable
from types import ModuleType
from typing import cast

from infra.errors import BadInput
from placement.config import TargetPlacement
from placement.policies import Policy


def target_policy(config: TargetPlacement) -> Policy:
    """Import a user's class, make an object of it with the options, and prove that it plans and drains."""
    module_name, _, path = config.target.partition(":")
    where = f"placement target {config.target!r}"
    found = _attribute(_module(module_name, where), path, where)
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
        near = _nearest(name, (known for known in dir(policy) if not known.startswith("_")))
        raise BadInput(f"{where}: expected a method {name}(inputs) that returns a Decision, found {method!r}{near}")
    try:
        inspect.signature(method).bind("inputs")
    except TypeError as error:
        found = inspect.signature(method)
        raise BadInput(f"{where}: expected to call {name}(inputs), found {name}{found}: {error}") from error


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


def _siblings(name: str) -> Iterable[str]:
    parent, _, _ = name.rpartition(".")
    if not parent:
        return (module.name for module in pkgutil.iter_modules())
    folders = getattr(importlib.import_module(parent), "__path__", ())
    return (f"{parent}.{module.name}" for module in pkgutil.iter_modules(folders))


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {near[0]!r}?" if near else ""
