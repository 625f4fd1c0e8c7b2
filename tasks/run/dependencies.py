"""What the results of a configured run depend on beside the configuration, found in this process without torch."""

import platform
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final

from blake3 import blake3
from pydantic import BaseModel

from infra.sources import library_version, rheostat_version, sources_of
from infra.store.dependencies import Dependencies, FileContent, check_dependencies, dependency_records
from infra.store.runs import Run, list_runs, open_run
from infra.variants import Variant
from models.config.algorithms import Algorithm
from models.config.engines import EngineSettings
from models.config.job import slot_engines
from models.config.rewards import ScoringConfig
from tasks.config.run import RunConfig
from tasks.run.keys import StageKey, iteration_key, iterations_among

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
    a copy.
    """
    records = [] if run is None else dependency_records(run)
    known = records[-1].dependencies.data if records else {}
    places = (config.data, config.preferences, config.algorithm, config.update.loss)
    paths = sorted({path for place in places for path in _files(place)})
    variants = {"data": config.data, "algorithm": config.algorithm, "loss": config.update.loss}
    engines = {name: engine for name, engine, _ in slot_engines(config.rollout, config.scoring)}
    return _dependencies(variants, engines, config.scoring, data={str(path): _content(path, known) for path in paths})


def rescoring_dependencies(scoring: ScoringConfig) -> Dependencies:
    """What scores depend on beside the rewards' configuration."""
    return _dependencies({}, {name: engine for name, engine, _ in slot_engines(None, scoring)}, scoring)


def recredit_dependencies(algorithm: Algorithm) -> Dependencies:
    """What advantages depend on beside the algorithm's configuration."""
    return _dependencies({"algorithm": algorithm}, {}, None)


def _dependencies(
    variants: Mapping[str, Variant],
    engines: Mapping[str, EngineSettings],
    scoring: ScoringConfig | None,
    *,
    data: Mapping[str, FileContent] = {},
) -> Dependencies:
    rules = () if scoring is None else scoring.rules
    functions = [rule.function for rule in rules if rule.brings_code]
    targets = {f"reward {function.target}": {function.target} for function in functions}
    for name, variant in {**variants, **engines}.items():
        if not variant.ships_with("models"):
            targets[f"{name} {variant.known_as}"] = {type(variant).__module__, variant.implementation}
    sources = {name: [sources_of(target) for target in sorted(named)] for name, named in targets.items()}
    imported = {library for found in sources.values() for each in found for library in each.libraries}
    versions = {"python": platform.python_version(), "rheostat": rheostat_version()}
    for engine in engines.values():
        versions |= engine.libraries()
    return Dependencies(
        code={name: {k: v for each in found for k, v in each.modules.items()} for name, found in sources.items()},
        data=dict(data),
        libraries=versions | {library: library_version(library) for library in (*LIBRARIES, *sorted(imported))},
    )


def find_run(config: RunConfig, *, accept_change: bool = False) -> Run | None:
    """The configured run where it was begun before.

    RunChanged if that was by another configuration, or, unless this is accepted, with other code, data or libraries.
    """
    if config.name not in list_runs(config.store):
        return None
    run = open_run(config.store, config.name)
    run.check_identity(config.identity())
    if not accept_change:
        check_dependencies(run, dependencies_of(config, run))
    return run


def next_iteration(run: Run) -> int:
    """Number of the first iteration that is not sealed."""
    numbers = iterations_among(run.folders())
    return 1 + sum(run.has(StageKey.of(iteration_key(number), "seal")) for number in numbers)


def _files(value: object) -> Iterator[Path]:
    """Files that settings name; what is not there is left to whoever reads it."""
    match value:
        case Path():
            if value.is_file():
                yield value
        case BaseModel():
            for _, part in value:
                yield from _files(part)
        case Mapping():
            for part in value.values():
                yield from _files(part)
        case tuple() | list():
            for part in value:
                yield from _files(part)


def _content(path: Path, known: Mapping[str, FileContent]) -> FileContent:
    found, before = path.stat(), known.get(str(path))
    size, modified_ns = found.st_size, found.st_mtime_ns
    if before is not None and size > WHOLE_BYTES and (before.bytes, before.modified_ns) == (size, modified_ns):
        return before
    return FileContent(digest=_digest(path, size, modified_ns), bytes=size, modified_ns=modified_ns)


@cache
def _digest(path: Path, size: int, modified_ns: int) -> str:
    """Read a file once per process, unless it changes."""
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest() if size else blake3().hexdigest()
