"""What the results of a configured run depend on beside the configuration, found in this process without torch.

Of code that users bring these are the modules that it consists of, and the libraries that it imports; nothing of it is
imported. Of a target these are its module, the packages that this lies in, and all that they import, in functions too,
as far as it is no library: not installed, or of the same top-level package as the target. What is imported by a name
that only the running code knows is not found, nor are files that it reads.
"""

import ast
import json
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.machinery import ModuleSpec
from importlib.util import resolve_name
from itertools import pairwise
from pathlib import Path
from typing import Final, cast

from blake3 import blake3

from infra.config import difference
from infra.plugins import PACKAGES, find_target, target_folders
from infra.processes.child import user_folders
from infra.processes.episodes import RunEnvironment
from infra.store.dependencies import Dependencies, FileContent, check_dependencies, dependency_records
from infra.store.file_digests import file_digests
from infra.store.inputs import PathNames, fetched, is_remote, paths_in
from infra.store.run_record import has_results
from infra.store.runs import Run, list_runs, open_run
from infra.store.tombstones import check_not_deleted, check_remembers
from infra.variants import Variant
from models.config.algorithms import Algorithm
from models.config.data import DataSource
from models.config.engines import EngineSettings
from models.config.job import slot_engines
from models.config.rewards import ScoringConfig
from tasks.config.run import LAYOUT, RunConfig
from tasks.run.keys import StageKey, evaluation_key, iteration_key, iterations_among

LIBRARIES: Final = (
    "deepspeed",
    "jinja2",  # chat templates
    "math-verify",
    "numpy",
    "peft",
    "pyarrow",
    "sympy",  # math-verify's verdicts
    "tokenizers",
    "torch",
    "transformers",
)
WHOLE_BYTES: Final = 2**26
"""A larger file whose size and time are those of the record is not read again."""


def dependencies_of(config: RunConfig, run: Run | None = None) -> Dependencies:
    """Find what results depend on beside the configuration; `run` is the one that goes on, if it was begun before.

    The placement is left out, since no result depends on it, and so are directories with models, of which a run keeps
    a copy; of retrievers and CLIPs it keeps none.
    """
    records = [] if run is None else dependency_records(run)
    known = records[-1].dependencies.data if records else {}
    places = (config.data, config.preferences, config.algorithm, config.update.loss, config.rollout.environment)
    paths = sorted({path for place in (*places, *config.scoring.rules) for path in _files(place)})
    names = PathNames(config, None if run is None else run.record.config)
    variants = {"data": config.data, "algorithm": config.algorithm, "loss": config.update.loss}
    engines = {name: engine for name, engine, _ in slot_engines(config.rollout, config.scoring)}
    data = _contents({names.name(path): [path] for path in paths} | _beside(config.data, names), known)
    environment = None if config.rollout.environment is None else config.rollout.environment.run
    return _dependencies(variants, engines, config.scoring, data=data, layout=config.layout(), environment=environment)


def rescoring_dependencies(scoring: ScoringConfig) -> Dependencies:
    """What scores depend on beside the rewards' configuration."""
    engines = {name: engine for name, engine, _ in slot_engines(None, scoring)}
    paths = sorted({path for rule in scoring.rules for path in _files(rule)})
    names = PathNames(scoring)
    return _dependencies({}, engines, scoring, data=_contents({names.name(path): [path] for path in paths}, {}))


def recredit_dependencies(algorithm: Algorithm) -> Dependencies:
    """What advantages depend on beside the algorithm's configuration."""
    return _dependencies({"algorithm": algorithm}, {}, None)


def _dependencies(
    variants: Mapping[str, Variant],
    engines: Mapping[str, EngineSettings],
    scoring: ScoringConfig | None,
    *,
    data: Mapping[str, FileContent] = {},
    layout: Mapping[str, int] = {},
    environment: RunEnvironment | None = None,
) -> Dependencies:
    rules = () if scoring is None else scoring.rules
    functions = {f"reward {rule.function.target}": rule.function.target for rule in rules if rule.brings_code}
    functions |= {f"environment {target}": target for target in (environment.brought if environment else ())}
    # Their own processes find users' modules first, this process finds them last.
    sources = {name: [sources_of(target, (*user_folders(), *sys.path))] for name, target in functions.items()}
    for name, variant in {**variants, **engines}.items():
        if not variant.ships_with("models"):
            named = sorted({type(variant).__module__, variant.implementation})
            folders = (*sys.path, *target_folders())
            sources[f"{name} {variant.known_as}"] = [sources_of(target, folders) for target in named]
    imported = {library for found in sources.values() for each in found for library in each.libraries}
    versions = {"python": platform.python_version(), "rheostat": rheostat_version()}
    for engine in engines.values():
        versions |= engine.libraries()
    return Dependencies(
        code={name: {k: v for each in found for k, v in each.modules.items()} for name, found in sources.items()},
        data=dict(data),
        layout=dict(layout),
        libraries=versions | {library: library_version(library) for library in (*LIBRARIES, *sorted(imported))},
    )


def find_run(config: RunConfig, *, accept_change: bool = False) -> Run | None:
    """Return the configured run if it was begun before; None if there is none, or one without results that differs.

    Raises RunChanged if a run with results was made by another configuration or, unless the change is accepted, with
    other code, data, libraries or ranks, or if its results were deleted since. Raises RunHeld if a live process holds a
    run without results that differs.
    """
    if config.name not in list_runs(config.store):
        return None
    run = open_run(config.store, config.name)
    if not has_results(run.store):
        recorded = run.record.config
        if not difference(config.normalize(recorded), config.identity(recorded), besides=LAYOUT):
            return run
        run.check_free()
        return None
    run.check_identity(config, besides=LAYOUT)
    check_not_deleted(run)
    check_remembers(run, evaluation_key(config.iterations))
    if not accept_change:
        check_dependencies(run, dependencies_of(config, run))
    return run


def layout_of(run: Run) -> dict[str, int]:
    """Over what a run's sums are spread now, by dotted key of the configuration."""
    records = dependency_records(run)
    return records[-1].dependencies.layout if records else {}


def moved_at(run: Run) -> int:
    """The iteration in which a run last went on on other ranks; 0 where it never did."""
    records = pairwise(dependency_records(run))
    return max((new.iteration for old, new in records if old.dependencies.layout != new.dependencies.layout), default=0)


def next_iteration(run: Run) -> int:
    """Number of the first iteration that is not sealed."""
    numbers = iterations_among(run.folders())
    return 1 + sum(run.has(StageKey.of(iteration_key(number), "seal")) for number in numbers)


def _files(value: object) -> Iterator[Path]:
    """Files that settings name; what is not there is left to whoever reads it."""
    for path in paths_in(value):
        if is_remote(path) or path.is_file():
            yield path
        elif (path / "modules.json").is_file() or _is_clip(path):  # the first are of sentence-transformers
            yield from (inner for inner in path.rglob("*") if inner.is_file())


def _is_clip(directory: Path) -> bool:
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("model_type") == "clip"


def _beside(source: DataSource, names: PathNames) -> dict[str, list[Path]]:
    """Files that data files name, by directory: there may be very many."""
    if not source.beside:
        return {}
    named = cast(Callable[[DataSource], Iterator[Path]], find_target(source.beside, where=source.known_as))(source)
    folders: dict[str, list[Path]] = {}
    for path in named:
        if is_remote(path) or path.is_file():
            folders.setdefault(f"{names.name(path.parent)}/*", []).append(path)
    return {folder: sorted(paths) for folder, paths in folders.items()}


def _contents(wanted: Mapping[str, Sequence[Path]], known: Mapping[str, FileContent]) -> dict[str, FileContent]:
    """Describe files, each name's together; what is large and as it was known is not read again."""
    found = {name: [_stat(path) for path in paths] for name, paths in wanted.items()}
    sizes = {name: (sum(size for _, size, _ in files), max(ns for *_, ns in files)) for name, files in found.items()}
    same = {name: before for name, before in known.items() if (before.bytes, before.modified_ns) == sizes.get(name)}
    contents = {name: before for name, before in same.items() if before.bytes > WHOLE_BYTES}
    unread = tuple(file for name, files in found.items() if name not in contents for file in files)
    digests = dict(zip(unread, file_digests(unread), strict=True))
    for name in wanted.keys() - contents.keys():
        size, modified_ns = sizes[name]
        each = [digests[file] for file in found[name]]
        digest = _together(wanted[name], each) if name.endswith("/*") else each[0]
        contents[name] = FileContent(digest=digest, bytes=size, modified_ns=modified_ns)
    return dict(sorted(contents.items()))


def _stat(path: Path) -> tuple[Path, int, int]:
    here = fetched(path)
    found = here.stat()
    return here.absolute(), found.st_size, found.st_mtime_ns


def _together(paths: Sequence[Path], digests: Sequence[str]) -> str:
    whole = blake3()
    for path, digest in zip(paths, digests, strict=True):
        whole.update(f"{path.name}\n{digest}\n".encode())
    return whole.hexdigest()


HOUSE: Final = Path(__file__).parents[2]
INSTALLED: Final = {"site-packages", "dist-packages"}


@dataclass(frozen=True, slots=True)
class Sources:
    """What a target consists of."""

    modules: dict[str, str]
    """Digests of its files, by module."""
    libraries: frozenset[str]
    """Top-level names of the libraries that it imports."""


def sources_of(target: str, folders: Sequence[str]) -> Sources:
    """Read the modules of `pkg.mod:name` that are found in the folders, of which the first have precedence.

    A target that is part of Rheostat, whose version covers it, or that cannot be found has no modules.
    """
    module = target.partition(":")[0]
    own = _top(module)
    modules, libraries, waiting = dict[str, str](), set[str](), [module]
    while waiting:
        for name, path in _module_files(waiting.pop(), folders):
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
    for path in (path for room in PACKAGES for path in sorted((HOUSE / room).rglob("*.py"))):
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
    return path.is_relative_to(HOUSE) and path.relative_to(HOUSE).parts[0] in PACKAGES


def _module_files(module: str, folders: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Find the files of the packages on the way to a module, and its own, as far as there are any."""
    if _top(module) in sys.stdlib_module_names:
        return
    paths = [*folders]
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
