"""Code that users bring, named `pkg.mod:attribute`, in processes that are ours: settings and what they name.

Functions of theirs that need nothing of ours run elsewhere (infra/processes/child.py).
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
    "find_targets_in",
    "nearest_name",
    "target_folders",
]

PACKAGES: Final = ("flows", "tasks", "models", "placement", "infra")
"""Top-level packages of Rheostat."""
TARGETS: Final = "RHEOSTAT_TARGETS"
"""Environment variable with folders in which targets are found when they are nowhere else; separated like PATH."""


def find_target(target: str, *, where: str) -> object:
    """Import what a target names. Raises BadInput, with the nearest name; `where` begins its message."""
    add_target_folders()
    try:
        return runner.find(target, where)
    except runner.Unusable as error:
        raise BadInput(str(error)) from error.__cause__


def find_targets_in(folder: Path) -> None:
    """Have targets found in this folder, too, by this process and by those that it starts from now on."""
    os.environ[TARGETS] = os.pathsep.join(dict.fromkeys([*_named_folders(), str(folder.resolve())]))


def add_target_folders() -> None:
    """Append the folders of users' modules to `sys.path`, so that a user's `models.py` does not hide ours.

    An editable installation is found after all of `sys.path`, so the packages of Rheostat are imported before.
    """
    for package in PACKAGES:
        importlib.import_module(package)
    sys.path += [folder for folder in target_folders() if folder not in sys.path]


def target_folders() -> list[str]:
    """List the working directory and the folders that were named, in which users' modules are."""
    return [str(Path.cwd()), *_named_folders()]


def check_function(target: str, *parameters: str, where: str, named: Iterable[str] = ()) -> None:
    """Raise BadInput unless a target can be imported and called with these parameters."""
    found = find_target(target, where=where)
    if not callable(found) or inspect.iscoroutinefunction(found):
        raise BadInput(
            f"{where}: expected what can be called with ({', '.join((*parameters, *named))}), found {found!r}"
        )
    try:
        runner.check_call(found, *parameters, where=where, named=dict.fromkeys(named))
    except runner.Unusable as error:
        raise BadInput(str(error)) from error.__cause__


def _named_folders() -> list[str]:
    return [folder for folder in os.environ.get(TARGETS, "").split(os.pathsep) if folder]
