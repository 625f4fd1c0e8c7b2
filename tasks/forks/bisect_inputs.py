"""Checks of the two runs of a bisection, and search for their code."""

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rheostat.infra.config import changed_keys
from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput
from rheostat.infra.plugins import register_target_folder
from rheostat.infra.processes.child import user_folders
from rheostat.infra.store.dependencies import Dependencies, dependency_records, recorded_config
from rheostat.infra.store.registry import open_existing_registry, registries
from rheostat.infra.store.runs import Run, list_runs
from rheostat.tasks.config.documents import place_overrides
from rheostat.tasks.config.run import RunConfig, override_config
from rheostat.tasks.forks.causes import find_code_changes, find_libraries
from rheostat.tasks.forks.creation import read_recorded_config
from rheostat.tasks.lineage.versions import champion_before
from rheostat.tasks.run.target_sources import rheostat_version, sources_of
from rheostat.tasks.views.metrics import sealed_iterations
from rheostat.tasks.views.runs import open_known_run


@dataclass(frozen=True, slots=True)
class CodeFolders:
    """Folders with the user's code of the two runs."""

    good: Path
    """Folder with the code of the better run, whose rewards judge all policies."""
    bad: Path
    """Folder with the code of the worse run."""
    are_separate: bool
    """Whether forks are trained in separate processes, because this process would import other code."""


def find_good_run(store: str, good: str, bad: str) -> str:
    """Return the name of the better run. If `good` is a registry and no run, it is the run of the champion from which
    the worse run started, or with which it was compared. Raises BadInput if there is no such champion, or if its run
    was trained further."""
    if good in list_runs(store) or good not in registries(store):
        return good
    registry = open_existing_registry(store, good)
    number = champion_before(registry, bad)
    record = next((each for each in registry.records() if each.number == number), None)
    if record is None:
        raise BadInput(
            f"registry {good!r} had no champion before run {bad!r}, so there is no better run to compare it with. "
            "Name the better run instead of the registry."
        )
    last = len(sealed_iterations(open_known_run(store, record.run)))
    if last != record.iteration:
        raise BadInput(
            f"{good}@{number} is the policy of run {record.run!r} after iteration {record.iteration}, but this run has "
            f"{format_count(last, 'iteration')}, so its last policy is another one. Name a run as the better run."
        )
    return record.run


def check_runs(good: Run, bad: Run) -> None:
    """Raise BadInput if two runs cannot be compared."""
    if good.name == bad.name:
        raise BadInput(f"bisect needs two different runs, found {good.name!r} twice.")
    for run in (good, bad):
        if not sealed_iterations(run):
            raise BadInput(f"run {run.name!r} has no completed iteration, so it cannot be compared.")
    if bad.fork is not None and bad.fork.replayed:
        raise BadInput(
            f"run {bad.name!r} is a what-if run, which was trained on stored rollouts. Its forks would generate new "
            "ones, so they could not be compared. Name a run that generated its own rollouts."
        )


def check_complete(run: Run, config: RunConfig) -> None:
    """Raise BadInput if a run with this configuration ended before the last iteration of its learning-rate schedule,
    because its forks would train longer than the run itself."""
    done = len(sealed_iterations(run))
    if config.update.schedule != "constant" and done != config.iterations:
        raise BadInput(
            f"run {run.name!r} has completed {done} of {format_count(config.iterations, 'iteration')}, and its "
            f"learning rate has the schedule {config.update.schedule!r}. Complete the run before you bisect it."
        )


def check_one_configuration(bad: Run, iteration: int) -> None:
    """Raise BadInput if a run changed its settings or code after `iteration`, at which it is forked. Forks would use
    the newest ones from the beginning."""
    parts = [] if bad.fork is None else bad.fork.parts
    changed = [part.iteration for part in parts if part.iteration > iteration and part.config != bad.record.config]
    records = [each for each in dependency_records(bad) if each.iteration <= max(iteration, 1)][-1:]
    records += [each for each in dependency_records(bad) if each.iteration > max(iteration, 1)]
    changed += [
        after.iteration - 1
        for before, after in itertools.pairwise(records)
        if before.dependencies.code != after.dependencies.code
    ]
    if changed:
        raise BadInput(
            f"run {bad.name!r} was trained with other settings or other code up to iteration {min(changed)}, because "
            "it is a fork or was continued with changes, so its forks could not be compared with it. If it is a "
            "fork, bisect the run from which it was forked. Otherwise train it again as a new run without changes."
        )


def absolute_settings(run: Run, store: str) -> dict[str, object]:
    """Return the configuration of a run as a document with absolute paths, so that parts of the configurations of
    several runs can be combined."""
    return read_recorded_config(run, store).model_dump(mode="json")  # only the context of PathNames makes them relative


def check_harmless(bad: Run, config: RunConfig, overrides: Sequence[str]) -> None:
    """Raise BadInput if an override changes a setting that affects the training, so that forks could not be compared
    with the worse run. `config` is the configuration of this run."""
    document = {**recorded_config(bad), "name": config.name, "store": config.store}
    changed = changed_keys(config.identity(), apply_harmless(document, overrides, bad.name).identity())
    changed += [each for each in overrides if each.partition("=")[0].strip() == "iterations"]
    if changed:
        raise BadInput(
            f"bisect: {changed[0].partition('=')[0]} affects the training, so forks could not be compared with "
            f"{bad.name!r}. Only settings such as pools.workers, and settings of the evaluation, can be changed."
        )


def apply_harmless(document: Mapping[str, object], overrides: Sequence[str], run: str) -> RunConfig:
    """Return the configuration of a run with the overrides of the user."""
    placed = place_overrides(overrides, Path.cwd(), job=Path.cwd())
    return override_config(document, placed, source=f"run {run}", recorded=True)


def find_code(good: Run, bad: Run, *, good_folder: Path | None, bad_folder: Path | None) -> CodeFolders:
    """Find the folders with the user's code of two runs, and add them to the folders that are searched for modules.
    `good_folder` and `bad_folder` are the values of --good-code and --bad-code, or None. Raises BadInput if a folder
    does not exist, or if the modules in it have other content than the run recorded."""
    before, after = map(_newest_dependencies, (good, bad))
    bad_code = _find_folder(bad, bad_folder, "--bad-code")
    is_same = not find_code_changes(before, after) and before.code.keys() <= after.code.keys()
    good_code = bad_code if is_same and good_folder is None else _find_folder(good, good_folder, "--good-code")
    here = (*user_folders(), *sys.path, str(bad_code))
    are_separate = good_code != bad_code or any(any(_find_changed_code(run, here)) for run in (good, bad))
    for folder in (bad_code, good_code):
        register_target_folder(folder)
    return CodeFolders(good_code, bad_code, are_separate)


_VERSIONS: Final = """
import json, platform, sys
from rheostat.infra.terminal import write
from rheostat.tasks.run.target_sources import library_version, rheostat_version
versions = {name: platform.python_version() if name == "python" else library_version(name) for name in sys.argv[1:]}
write(json.dumps({**versions, "rheostat": rheostat_version()}))
"""
"""Program that writes the versions of Rheostat, Python and some libraries as JSON."""
_VERSIONS_SECONDS: Final = 300.0


def check_good_python(python: Path, good: Run, *configs: RunConfig) -> None:
    """Raise BadInput unless a Python interpreter can train forks with the libraries of the better run: it must have the
    present version of Rheostat, and the library versions that this run recorded."""
    expected = find_libraries(_newest_dependencies(good), *configs)
    command = [str(python), "-P", "-c", _VERSIONS, *expected]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_VERSIONS_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadInput(
            f"--good-python: {python} cannot be run ({error}). Name the Python interpreter of an environment, such as "
            "../before-env/bin/python."
        ) from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise BadInput(
            f"--good-python: {python} cannot import Rheostat ({reason}). Install Rheostat {rheostat_version()} in its "
            "environment."
        )
    try:
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise BadInput(
            f"--good-python: {python} prints no versions, so it is not a Python interpreter. Name the interpreter "
            "of an environment, such as ../before-env/bin/python."
        ) from None
    expected["rheostat"] = rheostat_version()
    differing = [
        f"{name} must be {version}, but is {found[name]}"
        for name, version in expected.items()
        if found[name] != version
    ]
    if differing:
        raise BadInput(
            f"--good-python: the environment of {python} must have the libraries of run {good.name!r} and this version "
            f"of Rheostat: {'; '.join(differing)}."
        )


def _newest_dependencies(run: Run) -> Dependencies:
    records = dependency_records(run)
    return records[-1].dependencies if records else Dependencies(code={}, data={}, libraries={})


def _find_folder(run: Run, folder: Path | None, option: str) -> Path:
    """Return the folder with the user's code of a run: `folder` if it is given, otherwise the folder of the run's job,
    or the working directory. Raises BadInput if the code is not there."""
    if folder is not None and not folder.is_dir():
        raise BadInput(f"{option}: the folder {folder} does not exist (working directory {Path.cwd()}).")
    recorded = next((Path(each.folder) for each in dependency_records(run)[-1:] if each.folder), Path.cwd())
    place = (folder or (recorded if recorded.is_dir() else Path.cwd())).absolute()
    for name, module, is_present in _find_changed_code(run, (str(place), *sys.path)):
        problem = "differs from the recorded one" if is_present else "is missing"
        raise BadInput(
            f"bisect needs the code with which run {run.name!r} was trained, but module {module} of {name} in {place} "
            f"{problem}. Set {option} to a folder with this version, such as a git worktree."
        )
    return place


def _find_changed_code(run: Run, folders: Sequence[str]) -> Iterator[tuple[str, str, bool]]:
    """Yield the modules of the user whose files in these folders differ from those that a run recorded: the recorded
    name of the code, the module, and whether the module exists."""
    for name, modules in _newest_dependencies(run).code.items():
        for module, digest in sorted(modules.items()):
            found = sources_of(module, folders).modules.get(module)
            if found != digest:
                yield name, module, found is not None
