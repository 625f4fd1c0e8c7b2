"""Users' code, named by import strings `pkg.mod:attribute`, in our processes: settings and their implementations.

Users' functions that need nothing of Rheostat run in separate processes (infra/processes/child.py).
"""

import importlib
import inspect
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from infra import runner
from infra.errors import BadInput
from infra.runner import nearest_name

__all__ = [
    "PACKAGES",
    "TARGETS",
    "add_target_folders",
    "check_function",
    "find_target",
    "nearest_name",
    "register_target_folder",
    "target_folders",
]

PACKAGES: Final = ("flows", "tasks", "models", "placement", "infra")
"""Top-level packages of Rheostat."""
TARGETS: Final = "RHEOSTAT_TARGETS"
"""Environment variable with additional folders of users' modules, separated like PATH. They are searched last."""


def find_target(target: str, *, where: str) -> object:
    """Import the object that a target names. `where` is the start of error messages.

    Raises BadInput, with the nearest name, if the object cannot be imported.
    """
    add_target_folders()
    try:
        return runner.import_target(target, where)
    except runner.InvalidTarget as error:
        raise BadInput(str(error)) from error.__cause__


def register_target_folder(folder: Path) -> None:
    """Add a folder in which this process, and processes that it starts later, find targets."""
    os.environ[TARGETS] = os.pathsep.join(dict.fromkeys([*_named_folders(), str(folder.resolve())]))


def add_target_folders() -> None:
    """Append the folders of users' modules to `sys.path`, so that a user's `models.py` does not hide ours.

    An editable installation is found after all of `sys.path`, so the packages of Rheostat are imported before.
    """
    for package in PACKAGES:
        importlib.import_module(package)
    sys.path += [folder for folder in target_folders() if folder not in sys.path]


def target_folders() -> list[str]:
    """Return the working directory and the folders in RHEOSTAT_TARGETS, in which users' modules are found."""
    return [str(Path.cwd()), *_named_folders()]


def check_function(target: str, *parameters: str, where: str, named: Iterable[str] = ()) -> None:
    """Raise BadInput unless a target can be imported and called with these parameters, the `named` ones by keyword."""
    function = find_target(target, where=where)
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise BadInput(
            f"{where}: expected a function (not async) that can be called with ({', '.join((*parameters, *named))}), "
            f"found {function!r}"
        )
    try:
        runner.check_call(function, *parameters, where=where, named=dict.fromkeys(named))
    except runner.InvalidTarget as error:
        raise BadInput(str(error)) from error.__cause__


def _named_folders() -> list[str]:
    return [folder for folder in os.environ.get(TARGETS, "").split(os.pathsep) if folder]
