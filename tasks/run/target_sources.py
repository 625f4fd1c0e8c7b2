"""Source files and libraries of the code that a configuration names, found without importing user code, and the
versions of libraries and of Rheostat."""

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

from rheostat.infra.demos import DEMOS, EXAMPLES, SHARED_MODULES, is_in_demo
from rheostat.infra.former_names import FOLDERS, HOME
from rheostat.infra.syntax import parse_source

LIBRARY_FOLDERS: Final = {"site-packages", "dist-packages"}


@dataclass(frozen=True, slots=True)
class Sources:
    """Source files and imported libraries of code that the configuration names, such as a reward function."""

    modules: dict[str, str]
    """Digest of each source file, by module name."""
    libraries: frozenset[str]
    """Top-level names of the libraries that the code imports."""


def sources_of(target: str, folders: Sequence[str]) -> Sources:
    """Find the source files that the target `pkg.mod:name` needs. Modules are searched in `folders` in this order.

    A target that cannot be found, or is part of Rheostat or of an installed demonstration, has no modules. The version
    of Rheostat covers this code.
    """
    module = target.partition(":")[0]
    own = _top_level(module)
    modules, libraries, waiting = dict[str, str](), set[str](), [module]
    while waiting:
        for name, path in _module_files(waiting.pop(), folders):
            if name in modules:
                continue
            if _is_ours(path):
                break
            if _top_level(name) != own and LIBRARY_FOLDERS & {*path.parts}:
                libraries.add(_top_level(name))
                break
            source = path.read_bytes()
            modules[name] = blake3(source).hexdigest()
            package = name if path.stem == "__init__" else name.rpartition(".")[0]
            waiting += (each for each in _find_imports(source, package) if _top_level(each) not in libraries)
    return Sources(modules, frozenset(libraries))


@cache
def rheostat_version() -> str:
    """Return Rheostat's version, a plus sign, and a digest of its source files and of the demonstrations. The digest
    distinguishes versions between releases."""
    whole = blake3()
    roots = [HOME / folder for folder in FOLDERS]
    files = [path for root in roots for path in sorted(root.rglob("*.py")) if not _is_left_out(path)]
    for path in files:
        whole.update(path.relative_to(HOME).as_posix().encode() + path.read_bytes())
    for path in sorted({*DEMOS.rglob("*.py"), *SHARED_MODULES}):
        whole.update(path.relative_to(EXAMPLES).as_posix().encode() + path.read_bytes())
    return f"{metadata.version('rheostat')}+{whole.hexdigest()[:8]}"


def library_version(name: str) -> str:
    """Return the version of the distribution with this name, or of the distributions that provide a top-level module
    with this name. Return `none` if there is neither."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ", ".join(sorted(metadata.version(each) for each in {*_distributions().get(name, ())})) or "none"


@cache
def _distributions() -> dict[str, list[str]]:
    return {**metadata.packages_distributions()}  # reads the file lists of all installed distributions


def _top_level(module: str) -> str:
    return module.partition(".")[0]


def _is_ours(path: Path) -> bool:
    place = path.resolve()
    if is_in_demo(place):
        return True
    return place.is_relative_to(HOME) and place.relative_to(HOME).parts[0] in (*FOLDERS, "__init__.py", "__main__.py")


def _is_left_out(path: Path) -> bool:
    """Return whether a file does not count for the version: a file of a demonstration, or of the package `rheostat`
    itself, which a wheel stores in another folder."""
    return is_in_demo(path) or path.parent.name == "root-package"


def _module_files(module: str, folders: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield the name and the source file of a module and of each package that contains the module, if found in
    `folders`."""
    if _top_level(module) in sys.stdlib_module_names:
        return
    paths = [*folders]
    parts = module.split(".")
    for depth, tail in enumerate(parts, start=1):
        name = ".".join(parts[:depth])
        spec = _find_spec(name, paths)
        if spec is None:
            return
        if spec.origin is not None and Path(spec.origin).is_file():
            yield name, Path(spec.origin)
            if spec.submodule_search_locations is None:
                return
            paths = [*spec.submodule_search_locations]
        else:  # namespace package: the finder would resolve its parent from loaded modules
            paths = [str(Path(path, tail)) for path in paths if Path(path, tail).is_dir()]


def _find_spec(name: str, paths: Sequence[str]) -> ModuleSpec | None:
    return next(filter(None, (finder.find_spec(name, paths) for finder in sys.meta_path)), None)


def _find_imports(source: bytes, package: str) -> Iterator[str]:
    """Yield the modules that a source file imports. For `from a import b`, only `a.b` is yielded, and the search for
    its files covers `a`."""
    try:
        tree = parse_source(source)
    except (SyntaxError, ValueError):  # compiled code; a syntax error is reported by the code that imports the file
        return
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                try:
                    base = resolve_name("." * level + (module or ""), package)
                except ImportError:  # relative import beyond the top-level package
                    continue
                yield from (f"{base}.{alias.name}" for alias in names)
