"""Import of users' code into Rheostat's own processes. The code is named by import strings of the form
`pkg.mod:attribute`.

Users' functions that need nothing from Rheostat run in separate processes instead (infra/processes/child.py).
"""

import inspect
import os
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from rheostat.infra import runner
from rheostat.infra.demos import EXAMPLES, FORMER_TARGETS, SHARED_MODULES, demo_folder
from rheostat.infra.errors import BadInput
from rheostat.infra.former_names import allow_former_imports, present_name
from rheostat.infra.runner import nearest_name

__all__ = [
    "TARGETS",
    "add_target_folders",
    "check_function",
    "find_target",
    "nearest_name",
    "present_target",
    "register_demo",
    "register_target_folder",
    "target_folders",
]

TARGETS: Final = "RHEOSTAT_TARGETS"
"""Name of the environment variable with additional folders of users' Python modules, separated as in PATH. These
folders are searched last."""


def find_target(target: str, *, where: str) -> object:
    """Import the object that the import string `target` names, and return it. The modules that the example jobs share
    are found without their folder if no other module has the name. Raises BadInput if the object cannot be imported.
    The message starts with `where` and suggests the most similar name."""
    target = present_target(target)
    add_target_folders()
    module = target.partition(":")[0]
    if EXAMPLES / f"{module}.py" in SHARED_MODULES and find_spec(module) is None:
        register_target_folder(EXAMPLES)
        add_target_folders()
    try:
        return runner.import_target(target, where)
    except runner.InvalidTarget as error:
        raise BadInput(str(error)) from error.__cause__


def register_target_folder(folder: Path) -> None:
    """Add a folder with users' Python modules to the folders that are searched for imports, in this process and in all
    processes that it starts later."""
    os.environ[TARGETS] = os.pathsep.join(dict.fromkeys([*_named_folders(), str(folder.resolve())]))


def register_demo(place: str) -> str:
    """Register the folder of a demonstration, and return the import string of one of its parts. `place` has the form
    `folder/module:name`, as in the tables of infra/demos.py."""
    demo, _, target = place.partition("/")
    register_target_folder(demo_folder(demo))
    return target


def present_target(target: str) -> str:
    """Return the present import string of a part of a demonstration or of Rheostat if `target` is its former import
    string. Register the folder of the demonstration. Return all other import strings unchanged."""
    place = FORMER_TARGETS.get(target)
    return present_name(target, (*target_folders(), *sys.path)) if place is None else register_demo(place)


def add_target_folders() -> None:
    """Append the folders with users' Python modules to `sys.path`. Modules in these folders may import Rheostat's
    modules by their former names."""
    allow_former_imports()
    sys.path += [folder for folder in target_folders() if folder not in sys.path]


def target_folders() -> list[str]:
    """Return the folders that are searched for users' Python modules: the working directory, and the folders in the
    environment variable RHEOSTAT_TARGETS."""
    return [str(Path.cwd()), *_named_folders()]


def check_function(target: str, *parameters: str, where: str, named: Iterable[str] = ()) -> None:
    """Raise BadInput unless the function that the import string `target` names exists and accepts these parameters.
    Parameters in `named` are passed by keyword. The message starts with `where`."""
    function = find_target(target, where=where)
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise BadInput(
            f"{where} must be a function (not async) that can be called with the arguments "
            f"({', '.join((*parameters, *named))}), found {function!r}"
        )
    try:
        runner.check_call(function, *parameters, where=where, named=dict.fromkeys(named))
    except runner.InvalidTarget as error:
        raise BadInput(str(error)) from error.__cause__


def _named_folders() -> list[str]:
    return [folder for folder in os.environ.get(TARGETS, "").split(os.pathsep) if folder]
