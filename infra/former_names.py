"""Names that Rheostat's modules had before they were part of the package `rheostat`, such as `models.config.data`.

Stored runs, deployments and users' code may contain these names. A user's own module of the same name takes precedence.
"""

import sys
import warnings
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Final

PACKAGE: Final = "rheostat"
"""Import package that contains all of Rheostat's modules. It is also the parent of their loggers."""
FOLDERS: Final = ("flows", "tasks", "models", "placement", "infra")
"""Packages inside the package `rheostat`. They were top-level packages formerly."""
HOME: Final = Path(__file__).resolve().parents[1]
"""Folder that contains the packages: the root of a checkout, or the package `rheostat` of an installation."""


def present_name(name: str, folders: Iterable[str]) -> str:
    """Return the present import string for a former one, of a module of Rheostat or of an object in the module. Return
    all other import strings unchanged. If one of the `folders` contains a user's module of this name, the import string
    means that module and is unchanged too."""
    module = name.partition(":")[0]
    if not _is_former(module) or "." not in module or not _has_module(HOME, module):
        return name
    own = (folder for folder in map(Path, folders) if folder.resolve() != HOME)
    return name if any(_has_module(folder, module) for folder in own) else f"{PACKAGE}.{name}"


def former_name(name: str) -> str:
    """Return the former import string of a module of Rheostat or of an object in the module. Records contain this form,
    because the identity of a run must not change. Return all other import strings unchanged."""
    return name.removeprefix(f"{PACKAGE}.")


def allow_former_imports() -> None:
    """Let users' modules that are imported into this process import Rheostat's modules by their former names."""
    if not any(isinstance(finder, _FormerModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _FormerModules())


class _FormerModules(MetaPathFinder, Loader):
    """Import finder and loader that returns the present module for its former name. Both names then refer to the same
    module object."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return a spec for a former name, or the spec of the user's top-level module of this name."""
        top, _, rest = name.partition(".")
        if top not in FOLDERS or (path is not None and not rest):  # a search in given folders
            return None
        if not rest and (own := self._find_users(name)):
            return own
        if rest and sys.modules.get(top) is not sys.modules.get(f"{PACKAGE}.{top}"):
            return None  # a module in a package of the user
        return spec_from_loader(name, self) if find_spec(f"{PACKAGE}.{name}") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import and return the module by its present name."""
        if "." not in spec.name:
            warnings.warn(
                f"A module imports Rheostat's package {spec.name!r} by its former name. Import "
                f"'{PACKAGE}.{spec.name}' instead.",
                FutureWarning,
                stacklevel=2,
            )
        module = import_module(f"{PACKAGE}.{spec.name}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec of the module, which the import system has replaced. The module is already executed."""
        former = module.__spec__
        assert former is not None, "create_module has returned this module"
        module.__spec__ = former.loader_state

    def _find_users(self, name: str) -> ModuleSpec | None:
        """Return the spec of a user's top-level module, or None. A folder counts as a module if it contains Python
        files, because `models` is often a folder of checkpoints."""
        folders = [folder for folder in sys.path if Path(folder).resolve() != HOME]
        others = (finder.find_spec(name, None) for finder in sys.meta_path if finder not in (self, PathFinder))
        for spec in filter(None, (PathFinder.find_spec(name, folders), *others)):
            places = spec.submodule_search_locations
            if places is None or any(any(Path(place).glob("*.py")) for place in places):
                return spec
        return None


def _is_former(module: str) -> bool:
    return module.partition(".")[0] in FOLDERS


def _has_module(folder: Path, module: str) -> bool:
    path = folder.joinpath(*module.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
