"""What code consists of that users bring: its modules and the libraries that it imports; nothing of it is imported.

Of a target these are its module, the packages that this lies in, and all that they import, in functions too, as far
as it is no library: not installed, or of the same top-level package as the target. What is imported by a name that
only the running code knows is not found, nor are files that it reads.
"""

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.machinery import ModuleSpec
from importlib.util import resolve_name
from pathlib import Path
from typing import Final

from blake3 import blake3

from infra.plugins import target_folders

HOUSE: Final = Path(__file__).parents[1]
ROOMS: Final = ("flows", "tasks", "models", "placement", "infra")
INSTALLED: Final = {"site-packages", "dist-packages"}


@dataclass(frozen=True, slots=True)
class Sources:
    """What a target consists of."""

    modules: dict[str, str]
    """Digests of its files, by module."""
    libraries: frozenset[str]
    """Top-level names of the libraries that it imports."""


def sources_of(target: str) -> Sources:
    """Read the modules of `pkg.mod:name`; none where it is ours, whose version covers it, or cannot be found."""
    module = target.partition(":")[0]
    own = _top(module)
    modules, libraries, waiting = dict[str, str](), set[str](), [module]
    while waiting:
        for name, path in _files(waiting.pop()):
            if name in modules:
                continue
            if _is_ours(path):
                break
            if _top(name) != own and INSTALLED & {*path.parts}:
                libraries.add(_top(name))
                break
            source = path.read_bytes()
            modules[name] = blake3(source).hexdigest()
            package = name if path.stem == "__init__" else name.rpartition(".")[0]
            waiting += (each for each in _imports(source, package) if _top(each) not in libraries)
    return Sources(modules, frozenset(libraries))


@cache
def rheostat_version() -> str:
    """Name the version of Rheostat and, behind a plus, what its sources say: between two releases they change."""
    whole = blake3()
    for path in (path for room in ROOMS for path in sorted((HOUSE / room).rglob("*.py"))):
        whole.update(path.relative_to(HOUSE).as_posix().encode() + path.read_bytes())
    return f"{metadata.version('rheostat')}+{whole.hexdigest()[:8]}"


def library_version(name: str) -> str:
    """Return the version of a distribution, or of the one with the top-level module of that name; or `none`."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ", ".join(sorted(metadata.version(each) for each in {*_distributions().get(name, ())})) or "none"


@cache
def _distributions() -> dict[str, list[str]]:
    return {**metadata.packages_distributions()}  # reads what every distribution has installed


def _top(module: str) -> str:
    return module.partition(".")[0]


def _is_ours(path: Path) -> bool:
    return path.is_relative_to(HOUSE) and path.relative_to(HOUSE).parts[0] in ROOMS


def _files(module: str) -> Iterator[tuple[str, Path]]:
    """Find the files of the packages on the way to a module, and its own, as far as there are any."""
    if _top(module) in sys.stdlib_module_names:
        return
    paths = [*sys.path, *target_folders()]
    parts = module.split(".")
    for depth, tail in enumerate(parts, start=1):
        name = ".".join(parts[:depth])
        spec = _spec(name, paths)
        if spec is None:
            return
        if spec.origin is not None and Path(spec.origin).is_file():
            yield name, Path(spec.origin)
            if spec.submodule_search_locations is None:
                return
            paths = [*spec.submodule_search_locations]
        else:  # a package without a file of its own, which would look for the one that it lies in among what is loaded
            paths = [str(Path(path, tail)) for path in paths if Path(path, tail).is_dir()]


def _spec(name: str, paths: Sequence[str]) -> ModuleSpec | None:
    return next(filter(None, (finder.find_spec(name, paths) for finder in sys.meta_path)), None)


def _imports(source: bytes, package: str) -> Iterator[str]:
    """Name what a module imports; of `from a import b` both `a` and `a.b` may be modules."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # compiled code; what is wrong with a text says who imports it
        return
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                try:
                    base = resolve_name("." * level + (module or ""), package)
                except ImportError:  # beyond the top-level package
                    continue
                yield from (f"{base}.{alias.name}" for alias in names)
