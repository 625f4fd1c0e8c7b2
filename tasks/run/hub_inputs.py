"""Models and datasets of a job on the Hugging Face Hub: their commits, and the download of their files."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar, cast

from pydantic import BaseModel

from rheostat.infra.errors import BadInput
from rheostat.infra.store.dependencies import recorded_commits
from rheostat.infra.store.hub import METADATA, base_address, fetch_files, list_files, resolve_commit, split_files
from rheostat.infra.store.hub_names import HubAddress, has_file_suffix, is_hub_name
from rheostat.infra.store.inputs import (
    HubPath,
    JobPath,
    JobText,
    fetch_path,
    is_remote,
    paths_in,
    recorded_base,
    with_base,
)
from rheostat.infra.store.run_record import has_results
from rheostat.infra.store.runs import Run

M = TypeVar("M")
S = TypeVar("S", bound=BaseModel)

BASE: Final = "base model"
"""Kind of the base model of an adapter, in the keys under which a run records commits."""


def with_hub_commits(config: S, run: Run | None = None) -> S:
    """Return the configuration with a commit in each address on the Hub, and with the commit of the base model in the
    path of each LoRA adapter.

    A run with results keeps its recorded commits, and its recorded local paths stay local. Other names are resolved by
    the Hub. Raises BadInput if a name cannot be resolved, or if a local path has the name that the run read from the
    Hub.
    """
    is_recorded = run is not None and has_results(run.store)
    commits = recorded_commits(run) if run is not None and is_recorded else {}
    for path in paths_in(config):
        if isinstance(path, JobPath) and not isinstance(path, HubPath):
            for kind in ("model", "dataset"):
                if f"{kind} {path.relative}" in commits:
                    raise BadInput(
                        f"{path} has the name of the {kind} {path.relative}, which this run read from the Hugging Face "
                        "Hub. Rename the local path to continue the run."
                    )

    def pin(path: Path) -> Path:
        if not isinstance(path, HubPath) or (address := path.address).is_pinned:
            return path
        if path.key in commits:
            return path.with_address(address.pin(commits[path.key]))
        if is_recorded:  # a local path that does not exist, or another configuration, which is refused later
            return path if "://" in path.relative else _local_path(path)
        return path.with_address(address.pin(resolve_commit(address)))

    return with_base_commits(_replace_paths(config, pin), commits, resolves=not is_recorded)


def with_derived_commits(settings: S, run: Run, prefix: str) -> S:
    """Return the settings of a derived result, such as the rewards of a rescoring, with a commit in each address on the
    Hub. `prefix` is the prefix of its keys.

    The commits are those that the derived result has recorded, else those that the run has recorded for the same name,
    else the present ones. Raises BadInput if a name cannot be resolved.
    """
    commits = {**recorded_commits(run), **recorded_commits(run, prefix)}

    def pin(path: Path) -> Path:
        if not isinstance(path, HubPath) or (address := path.address).is_pinned:
            return path
        text = address.text() if address.file else address.label  # the same for requests of other processes
        commit = commits.get(f"{address.kind} {text}") or commits.get(path.key) or resolve_commit(address)
        return HubPath.build(address.pin(commit), text, path.job)

    return with_base_commits(_replace_paths(settings, pin), commits, resolves=True)


def with_base_commits(settings: S, commits: Mapping[str, str], *, resolves: bool) -> S:
    """Return the settings with the commit of the base model in the path of each LoRA adapter whose base model is on the
    Hub. `commits` are recorded commits by keys such as `base model Qwen/Qwen3-0.6B`.

    If `resolves` is true, the Hub is queried for other commits, and BadInput is raised if it does not have the base
    model. Otherwise their paths do not change.
    """

    bases = {name: commit for name, commit in commits.items() if name.startswith(BASE)}
    if not bases and not resolves:
        return settings
    return _replace_paths(settings, lambda path: pin_base(path, bases, resolves=resolves))


def pin_base(path: Path, commits: Mapping[str, str] = {}, *, resolves: bool = True) -> Path:
    """Return the path of a LoRA adapter with the commit of its base model on the Hub, as `with_base_commits` chooses
    it. Other paths do not change."""
    base = None if recorded_base(path) else _find_base(path, is_required=resolves)
    if base is None:
        return path
    commit = base.revision if base.is_pinned else commits.get(f"{BASE} {base.label}", "")
    if not commit and resolves:
        commit = resolve_commit(base)
    label = base.name if base.is_pinned else base.label
    return with_base(path, f"{label}@{commit}") if commit else path


def _find_base(path: Path, *, is_required: bool) -> HubAddress | None:
    """Return the address of the base model on the Hub, if the path is a LoRA adapter. If `is_required` is false, return
    None if the Hub and the cache do not have the adapter."""
    if not isinstance(path, HubPath):
        return _find_base_in_bucket(path) if is_remote(path) else base_address(path)
    address = path.address
    if address.kind != "model" or address.file or not address.is_pinned:
        return None
    with suppress(*() if is_required else (BadInput,)):
        return base_address(fetch_files(address, METADATA))
    return None


def _find_base_in_bucket(path: Path) -> HubAddress | None:
    """Return the address of the base model on the Hub, if the path is the address of a LoRA adapter in a bucket.

    Return None if the address cannot be read, because the code that reads the whole adapter reports the error.
    """
    if has_file_suffix(path.name):
        return None
    with suppress(BadInput):
        settings = fetch_path(path / "adapter_config.json")
        with suppress(BadInput):  # only complete models have this file
            fetch_path(path / "config.json")
        return base_address(settings.parent)
    return None


def _replace_paths(value: M, change: Callable[[Path], Path]) -> M:
    """Return a copy of settings in which each path is replaced by the result of `change`."""
    match value:
        case Path():
            return cast(M, change(value))
        case BaseModel():
            changes = {name: new for name, part in value if (new := _replace_paths(part, change)) is not part}
            return value.model_copy(update=changes) if changes else value
        case Mapping():
            changes = {name: new for name, part in value.items() if (new := _replace_paths(part, change)) is not part}
            return cast(M, {**value, **changes}) if changes else value
        case tuple():
            parts = tuple(_replace_paths(part, change) for part in value)
            return cast(M, parts) if any(a is not b for a, b in zip(parts, value, strict=True)) else value
    return value


def _local_path(path: HubPath) -> Path:
    if not path.job:
        return Path(path.relative)
    text = JobText(path.relative)
    text.folder = text.job = Path(path.job)
    return JobPath.locate(text)


def hub_commits(config: BaseModel) -> dict[str, str]:
    """Return the commits of all models and datasets on the Hub, by their kind and name. Raises BadInput if a job names
    two revisions of a dataset by the same text."""
    commits: dict[str, str] = {}
    for path in paths_in(config):
        if isinstance(path, HubPath) and path.address.is_pinned:
            commit = path.address.revision
            if commits.setdefault(path.key, commit) != commit:
                raise BadInput(
                    f"The job uses {path.key} on the Hugging Face Hub in two different revisions. Write the same "
                    f"revision into each path: {path.relative}@REVISION"
                )
    return commits


def base_commits(config: BaseModel, run: Run | None = None) -> dict[str, str]:
    """Return the commits of the base models on the Hub of all LoRA adapters in a configuration, by keys such as `base
    model Qwen/Qwen3-0.6B`. A run with results keeps its recorded commits."""
    if run is not None and has_results(run.store):
        return {name: commit for name, commit in recorded_commits(run).items() if name.startswith(BASE)}
    bases = (recorded_base(path).rpartition("@") for path in paths_in(config))
    return {f"{BASE} {name}": commit for name, _, commit in bases if name}


def fetch_hub_inputs(config: BaseModel) -> None:
    """Fetch all files of a configuration that are on the Hub, with a progress bar. Files in the cache are kept. Raises
    BadInput if a file cannot be fetched."""
    for path in dict.fromkeys(paths_in(config)):
        if isinstance(path, HubPath) or recorded_base(path):
            fetch_path(path)


def describe_hub_inputs(config: BaseModel) -> dict[str, str]:
    """Describe the models and datasets on the Hub that were fetched, by name: commit and bytes. Local paths that could
    also be a name on the Hub are listed with their place."""
    local_paths = (path for path in paths_in(config) if isinstance(path, JobPath) and not isinstance(path, HubPath))
    lines = {f"path {path.relative}": f"local, {path}" for path in local_paths if is_hub_name(path.relative)}
    for path in paths_in(config):
        if isinstance(path, HubPath):
            folder, address = fetch_path(path), path.address.pin(resolve_commit(path.address))
            files = split_files(address) if address.kind == "dataset" and not address.file else None
            listed = list_files(address)
            root = Path(str(folder).removesuffix(f"/{address.file}")) if address.file else folder
            names = files or [name for name in listed if name.startswith(address.file) and (root / name).is_file()]
            part = ", ".join(filter(None, (address.config, address.split)))
            chosen = f" ({part})" if part else ""
            lines[f"{address.kind} {path.relative}{chosen}"] = _describe(
                address.revision, [listed[name].size for name in names]
            )
        base, _, commit = recorded_base(path).rpartition("@")
        if base:
            lines[f"{BASE} {base}"] = f"commit {commit[:12]}"
    return lines


def _describe(commit: str, sizes: list[int]) -> str:
    mebibytes = sum(sizes) / 2**20
    size = f"{mebibytes / 1024:,.1f} GiB" if mebibytes > 1024 else f"{mebibytes:,.1f} MiB"
    return f"commit {commit[:12]}, {len(sizes)} file{'' if len(sizes) == 1 else 's'}, {size}"
