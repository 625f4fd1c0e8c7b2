"""Dependencies of a run: everything besides the configuration that its results depend on.

These are the code of targets, the content of data files, and library versions. They are found in this process without
importing torch or user code. A target is a Python object that the configuration names as `pkg.mod:name`. The code of a
target is its module, the packages that contain the module, and all modules that they import (also inside functions),
except libraries. A module is a library if it is installed and not of the target's top-level package. Modules that are
imported by a computed name, and files that user code reads, are not found.
"""

import json
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Final, cast

from blake3 import blake3

from rheostat.infra.config import describe_difference
from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput
from rheostat.infra.former_names import former_name
from rheostat.infra.plugins import find_target, target_folders
from rheostat.infra.processes.child import user_folders
from rheostat.infra.store.dependencies import Dependencies, FileContent, check_dependencies, dependency_records
from rheostat.infra.store.file_digests import file_digests
from rheostat.infra.store.inputs import PathNames, fetch_path, is_on_hub, is_remote, paths_in
from rheostat.infra.store.run_record import has_results
from rheostat.infra.store.runs import Run, list_runs, open_run
from rheostat.infra.store.tombstones import check_not_deleted, check_remembers
from rheostat.infra.variants import Variant
from rheostat.models.config.algorithms import Algorithm
from rheostat.models.config.conflicts import slot_engines
from rheostat.models.config.data import DataSource
from rheostat.models.config.engines import EngineSettings
from rheostat.models.config.episodes import EpisodeSettings
from rheostat.models.config.file_rules import iterate_data_paths
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.config.training import ChatTraining
from rheostat.models.data.folders import STATE_FILE
from rheostat.models.data.rows import find_data_files
from rheostat.tasks.config.run import LAYOUT, RunConfig
from rheostat.tasks.run.hub_inputs import base_commits, hub_commits
from rheostat.tasks.run.keys import StageKey, evaluation_key, iteration_key, iteration_numbers
from rheostat.tasks.run.target_sources import library_version, rheostat_version, sources_of

LIBRARIES: Final = (
    "deepspeed",
    "jinja2",  # chat templates
    "math-verify",
    "numpy",
    "peft",
    "pyarrow",
    "sympy",  # verdicts of math-verify depend on it
    "tokenizers",
    "torch",
    "transformers",
)
WHOLE_BYTES: Final = 2**26
"""File size in bytes above which a file is not read again as long as its size and modification time have not changed.
"""


REWARD_CODE: Final = "reward "
"""Prefix of the names under which the code of reward functions is recorded. The rest is the target."""


def dependencies_of(config: RunConfig, run: Run | None = None) -> Dependencies:
    """Find everything besides the configuration that the results of a run depend on: code, data files and library
    versions. `run` is the existing run if it is resumed.

    Placement settings are left out, because no result depends on them. Model directories are left out because the run
    copies them. Models of retrievers and CLIP rewards are included, because the run does not copy these models.
    """
    records = [] if run is None else dependency_records(run)
    known = records[-1].dependencies.data if records else {}
    chats = None if config.warmup is None else config.warmup.chats
    places = (config.data, chats, config.preferences, config.algorithm, config.update.loss, config.rollout.environment)
    folders = _data_folders(places)
    files = {path for place in (*places, *config.scoring.rules) for path in _files_of(place)}
    names = PathNames(config, None if run is None else run.record.config)
    referenced = _referenced_files(config.data, names)
    if chats is not None:
        for name, images in _referenced_files(chats, names).items():
            referenced[name] = sorted({*referenced.get(name, ()), *images})
    paths_by_name = {names.name(path): [path] for path in sorted(files - folders.keys())}
    for name, inner in ((f"{names.name(folder)}/*", paths) for folder, paths in folders.items()):
        referenced[name] = sorted({*referenced.get(name, ()), *inner})
    variants = {
        "data": config.data,
        "policy": config.policy,
        "algorithm": config.algorithm,
        "loss": config.update.loss,
        **{f"judge {term}": shape for term, shape in config.scoring.judge_shapes.items()},
    }
    engines = {name: engine for name, engine, _ in slot_engines(config.rollout, config.scoring)}
    data = _digest_files(paths_by_name | referenced, known)
    found = _build_dependencies(
        variants, engines, config.scoring, data=data, layout=config.layout(), environment=config.rollout.environment
    )
    return found.model_copy(update={"hub": hub_commits(config) | base_commits(config, run)})


def rescoring_dependencies(scoring: ScoringConfig) -> Dependencies:
    """Find everything besides the configuration that new scores for stored rollouts depend on: reward code, data files
    and library versions."""
    engines = {name: engine for name, engine, _ in slot_engines(None, scoring)}
    paths = sorted({path for rule in scoring.rules for path in _files_of(rule)})
    names = PathNames(scoring)
    return _build_dependencies(
        {}, engines, scoring, data=_digest_files({names.name(path): [path] for path in paths}, {})
    )


def recredit_dependencies(algorithm: Algorithm) -> Dependencies:
    """Find everything besides the configuration that new advantages for stored rollouts depend on: code of the
    algorithm and library versions."""
    return _build_dependencies({"algorithm": algorithm}, {}, None)


def _build_dependencies(
    variants: Mapping[str, Variant],
    engines: Mapping[str, EngineSettings],
    scoring: ScoringConfig | None,
    *,
    data: Mapping[str, FileContent] = {},
    layout: Mapping[str, int] = {},
    environment: EpisodeSettings | None = None,
) -> Dependencies:
    rules = () if scoring is None else scoring.rules
    targets = [rule.function.target for rule in rules if rule.brings_code]
    functions = {f"{REWARD_CODE}{former_name(target)}": target for target in targets}
    functions |= {
        f"environment {former_name(target)}": target for target in (environment.run.targets if environment else ())
    }
    # Separate processes that run user code search the user's folders first. This process searches them last.
    sources = {name: [sources_of(target, (*user_folders(), *sys.path))] for name, target in functions.items()}
    for name, variant in {**variants, **engines}.items():
        if not variant.ships_with("models"):
            targets = sorted({type(variant).__module__, variant.implementation})
            folders = (*sys.path, *target_folders())
            sources[f"{name} {variant.label}"] = [sources_of(target, folders) for target in targets]
    imported = {library for target_sources in sources.values() for each in target_sources for library in each.libraries}
    versions = {"python": platform.python_version(), "rheostat": rheostat_version()}
    for part in (*engines.values(), *((environment,) if environment else ())):
        versions |= part.find_library_versions()
    return Dependencies(
        code={
            name: {k: v for each in target_sources for k, v in each.modules.items()}
            for name, target_sources in sources.items()
        },
        data=dict(data),
        layout=dict(layout),
        libraries=versions | {library: library_version(library) for library in (*LIBRARIES, *sorted(imported))},
    )


def find_matching_run(config: RunConfig, *, accept_change: bool = False) -> Run | None:
    """Return the configured run if it exists. Return None if there is no such run, or if the existing run has another
    configuration but no results yet.

    Raises RunChanged if a run with results has another configuration, if its code, data, libraries or ranks changed and
    `accept_change` is false, or if its results were deleted. Raises BadInput if the run has more iterations than are
    configured. Raises RunLocked if a live process has locked a run without results whose configuration differs.
    """
    if config.name not in list_runs(config.store):
        return None
    run = open_run(config.store, config.name)
    if not has_results(run.store):
        recorded = run.record.config
        if not describe_difference(config.normalize(recorded), config.identity(recorded), ignored=LAYOUT):
            return run
        run.check_unlocked()
        return None
    run.check_identity(config, ignored=LAYOUT)
    if (num_stored := next_iteration(run) - 1) > config.iterations:
        raise BadInput(
            f"iterations is {config.iterations}, but run {run.name!r} in {run.store.uri} already has "
            f"{format_count(num_stored, 'iteration')}. Set iterations to {num_stored} or more, or choose another name "
            "for a new run."
        )
    check_not_deleted(run)
    check_remembers(run, evaluation_key(config.iterations))
    if not accept_change:
        check_dependencies(run, dependencies_of(config, run))
    return run


def recorded_layout(run: Run) -> dict[str, int]:
    """Return the numbers of ranks and threads with which the run was last started, by dotted configuration key.
    Floating-point sums depend on these numbers."""
    records = dependency_records(run)
    return records[-1].dependencies.layout if records else {}


def relayout_iteration(run: Run) -> int:
    """Return the iteration in which the run was last resumed with a changed number of ranks, or 0 if the number never
    changed."""
    records = pairwise(dependency_records(run))
    return max((new.iteration for old, new in records if old.dependencies.layout != new.dependencies.layout), default=0)


def next_iteration(run: Run) -> int:
    """Return the number of the first iteration that is not complete."""
    numbers = iteration_numbers(run.folders())
    return 1 + sum(run.has(StageKey.of(iteration_key(number), "seal")) for number in numbers)


def _files_of(value: object) -> Iterator[Path]:
    """Yield the files whose paths occur in the settings. Missing files are skipped, because the code that reads them
    reports the error."""
    for path in paths_in(value):
        if is_on_hub(path):  # the commit identifies the content
            continue
        here = fetch_path(path) if is_remote(path) else path
        if here.is_file():
            yield path
        # a directory of sentence-transformers has modules.json
        elif (here / "modules.json").is_file() or _is_clip(here):
            yield from (path / inner.relative_to(here) for inner in here.rglob("*") if inner.is_file())


def _data_folders(settings: Sequence[object]) -> dict[Path, tuple[Path, ...]]:
    """Return the folders of data that settings name, each with its data files, and with the file that lists these files
    if they are not in the order of their names. Paths that the code that reads them refuses are skipped."""
    folders: dict[Path, tuple[Path, ...]] = {}
    for path in (path for each in settings for path in iterate_data_paths(each) if not is_on_hub(path)):
        with suppress(BadInput):
            found = find_data_files(path)
            if found.is_folder:
                files = tuple(file for file, _ in found.files)
                folders[path] = files if [*files] == sorted(files) else (*files, path / STATE_FILE)
    return folders


def _is_clip(directory: Path) -> bool:
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("model_type") == "clip"


def _referenced_files(source: DataSource | ChatTraining, names: PathNames) -> dict[str, list[Path]]:
    """Return the files that data files refer to, such as images. They are grouped by directory, because there may be
    millions."""
    if not source.referenced_files:
        return {}
    paths_by_reference = cast(
        Callable[[DataSource | ChatTraining], Iterator[Path]],
        find_target(source.referenced_files, where="data"),
    )(source)
    folders: dict[str, list[Path]] = {}
    for path in paths_by_reference:
        if not is_on_hub(path) and (is_remote(path) or path.is_file()):
            folders.setdefault(f"{names.name(path.parent)}/*", []).append(path)
    return {folder: sorted(paths) for folder, paths in folders.items()}


def _digest_files(
    paths_by_name: Mapping[str, Sequence[Path]], known: Mapping[str, FileContent]
) -> dict[str, FileContent]:
    """Return the size, modification time and digest of the files of each name. A large file is not read again if its
    size and modification time have not changed."""
    stats_by_name = {name: [_stat_file(path) for path in paths] for name, paths in paths_by_name.items()}
    sizes = {
        name: (sum(size for _, size, _ in files), max(ns for *_, ns in files)) for name, files in stats_by_name.items()
    }
    unchanged = {
        name: before for name, before in known.items() if (before.bytes, before.modified_ns) == sizes.get(name)
    }
    contents = {name: before for name, before in unchanged.items() if before.bytes > WHOLE_BYTES}
    unread = tuple(file for name, files in stats_by_name.items() if name not in contents for file in files)
    digests = dict(zip(unread, file_digests(unread), strict=True))
    for name in paths_by_name.keys() - contents.keys():
        size, modified_ns = sizes[name]
        each = [digests[file] for file in stats_by_name[name]]
        digest = _combine_digests(paths_by_name[name], each) if name.endswith("/*") else each[0]
        contents[name] = FileContent(digest=digest, bytes=size, modified_ns=modified_ns)
    return dict(sorted(contents.items()))


def _stat_file(path: Path) -> tuple[Path, int, int]:
    local_path = fetch_path(path)
    status = local_path.stat()
    return local_path.absolute(), status.st_size, status.st_mtime_ns


def _combine_digests(paths: Sequence[Path], digests: Sequence[str]) -> str:
    whole = blake3()
    for path, digest in zip(paths, digests, strict=True):
        whole.update(f"{path.name}\n{digest}\n".encode())
    return whole.hexdigest()
