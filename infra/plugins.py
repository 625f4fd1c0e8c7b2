"""Code that users bring, named `pkg.mod:attribute`."""

import difflib
import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Final

from infra.errors import BadInput

TARGETS: Final = "RHEOSTAT_TARGETS"
"""Environment variable with folders in which targets are found when they are nowhere else; separated like PATH."""


def find_target(target: str, *, where: str) -> object:
    """Import what a target names. Raises BadInput, with the nearest name; `where` begins its message."""
    sys.path += [folder for folder in _folders() if folder not in sys.path]  # last: they hide nothing of ours
    module_name, _, path = target.partition(":")
    found: object = _module(module_name, where)
    for name in path.split("."):
        if not hasattr(found, name):
            raise BadInput(f"{where}: no attribute {name!r} in {found!r}{nearest_name(name, dir(found))}")
        found = getattr(found, name)
    return found


def find_targets_in(folder: Path) -> None:
    """Have targets found in this folder, too, by this process and by those that it starts from now on."""
    os.environ[TARGETS] = os.pathsep.join(dict.fromkeys([*_folders(), str(folder.resolve())]))


def _folders() -> list[str]:
    return [folder for folder in os.environ.get(TARGETS, "").split(os.pathsep) if folder]


def check_function(target: str, *parameters: str, where: str, named: Iterable[str] = ()) -> None:
    """Raise BadInput unless a target can be imported and called with these parameters."""
    found = find_target(target, where=where)
    if not callable(found) or inspect.iscoroutinefunction(found):
        raise BadInput(
            f"{where}: expected what can be called with ({', '.join((*parameters, *named))}), found {found!r}"
        )
    check_call(found, *parameters, where=where, named=dict.fromkeys(named))


def check_call(
    function: Callable[..., object], *parameters: str, where: str, named: Mapping[str, object] | None = None
) -> None:
    """Raise BadInput unless a function takes these parameters, the named ones by keyword."""
    given = named or {}
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-ins do not tell; the call itself will
        return
    try:
        signature.bind(*parameters, **given)
    except TypeError as error:
        wanted = ", ".join((*parameters, *(f"{name}=…" for name in given)))
        raise BadInput(f"{where}: expected to call it with ({wanted}), found {signature}: {error}") from error


def nearest_name(name: str, known: Iterable[str]) -> str:
    """`, did you mean 'x'?`, or nothing where no known name is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {near[0]!r}?" if near else ""


def _module(name: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise BadInput(f"{where}: its module needs {error.name!r}, which is not installed") from error
        raise BadInput(f"{where}: no module {error.name!r}{nearest_name(error.name, _siblings(error.name))}") from error
    except (Exception, SystemExit) as error:  # whatever a user's module raises means that it cannot be used
        raise BadInput(f"{where}: importing it failed: {type(error).__name__}: {error}") from error


def _siblings(name: str) -> Iterable[str]:
    parent, _, _ = name.rpartition(".")
    if not parent:
        return (module.name for module in pkgutil.iter_modules())
    folders = getattr(importlib.import_module(parent), "__path__", ())
    return (f"{parent}.{module.name}" for module in pkgutil.iter_modules(folders))
