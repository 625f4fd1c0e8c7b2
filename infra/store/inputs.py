"""Paths in settings. A path names a file or directory on this machine, in a bucket, or on the Hugging Face Hub. Files
of buckets and of the Hub are downloaded into a cache.

A `Path` object cannot contain the two slashes of `s3://`. Therefore an address has one slash in a `Path` and two
slashes in text. A relative path in a job file starts in the folder of this file. If it exists only in the working
directory, this path is used, with a warning. A relative path on the command line starts in the working directory. All
become an absolute `JobPath`, which also stores the path relative to the folder of the job. A run records the relative
path, so that it can continue after its job and its files were moved to another folder.
"""

import copy
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PosixPath
from typing import Annotated, Final, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    JsonValue,
    PlainSerializer,
    SerializationInfo,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    WrapValidator,
)

from rheostat.infra.config import RECORDED
from rheostat.infra.errors import BadInput, DeprecatedSpelling
from rheostat.infra.store import remote_files
from rheostat.infra.store.hub import fetch_snapshot, find_hub_base, resolve_commit, split_files
from rheostat.infra.store.hub_names import HF, HubAddress, HubKind, is_hub_name, parse_hub_address, parse_hub_name
from rheostat.infra.store.storage import is_bucket_address, open_store

HUB: Final = "hf:"
_BASE: Final = re.compile(r"(.+)\?base=([\w./@-]+@[0-9a-f]{40})", re.ASCII | re.DOTALL)
"""Text of the path of an adapter with the commit of its base model, as sent to other processes."""
_SCHEMES: Final = (HUB, *(f"{scheme}:" for scheme in remote_files.PACKAGES))


def is_remote(path: Path) -> bool:
    """Return whether a path is an address of a file that is not on this machine, such as `s3://bucket/file`."""
    return path.parts[:1] != () and path.parts[0] in _SCHEMES


def is_on_hub(path: Path) -> bool:
    """Return whether a path is an address on the Hugging Face Hub (`hf://…`)."""
    return path.parts[:1] == (HUB,)


def format_path(path: Path) -> str:
    """Return a path or an address as text. A `Path` contains only one slash after the scheme of an address, such as
    `s3:`. The text has two."""
    return f"{path.parts[0]}//{'/'.join(path.parts[1:])}" if is_remote(path) else str(path)


class JobText(str):
    """Text from a job file or an override, with the folders that are needed if the text is a relative path. The path
    starts in `folder`, and runs store it relative to `job`."""

    folder: Path
    """Absolute path of the folder that contains the file with this text. For an override, this is the working
    directory."""
    job: Path
    """Absolute path of the folder that contains the job file."""


class RecordedName(JobText):
    """Name or address on the Hugging Face Hub in the configuration that is stored with a run, together with the commit
    that the run uses."""

    commits: Mapping[str, str]
    """Recorded commit by kind of the repository, "model" or "dataset"."""


class JobPath(PosixPath):
    """Absolute path that the user wrote as a relative path in a job file or an override, or path of a LoRA adapter with
    its base model on the Hugging Face Hub. Paths derived from it are plain paths, without the fields."""

    relative: str = ""
    """The same path relative to the folder of the job."""
    job: str = ""
    """Folder of the job."""
    base: str = ""
    """Base model on the Hugging Face Hub of the LoRA adapter at this path, with the commit that the run uses:
    `owner/name@commit` or `owner/name@branch@commit`. Empty for other paths, or if the commit is not known."""

    @classmethod
    def locate(cls, text: JobText) -> Self:
        """Return the absolute path for a text that is a relative path. It starts in the folder of the text, which may
        be a folder that does not exist yet."""
        full = text.folder / text
        # The system follows `..` only out of folders that exist.
        path = cls(full if text.folder.is_dir() else os.path.normpath(full))
        path.relative, path.job = os.path.relpath(path, text.job), str(text.job)
        return path

    def __reduce__(self) -> tuple[object, ...]:
        """Return the state for copying and pickling, so that both fields are kept."""
        return type(self), (str(self),), self.__dict__


class HubPath(JobPath):
    """Address of a model or dataset on the Hugging Face Hub. `relative` is the text that the user wrote in the job
    file, and that runs store."""

    @classmethod
    def build(cls, address: HubAddress, text: str, job: str) -> Self:
        """Return the path for an address. `text` is what the user wrote, and `job` is the folder of the job file."""
        path = cls(address.text())
        path.relative, path.job = text, job
        return path

    @property
    def address(self) -> HubAddress:
        """Parsed address on the Hugging Face Hub."""
        return parse_hub_address(format_path(self))

    @property
    def key(self) -> str:
        """Key under which a run records the commit: kind and name in the job file, such as `model Qwen/Qwen3-0.6B`."""
        return f"{self.address.kind} {self.relative}"

    def with_address(self, address: HubAddress) -> Self:
        """Return a path with another address, but the same text in the job file."""
        return self.build(address, self.relative, self.job)


def with_base(path: Path, base: str) -> JobPath:
    """Return the path of a LoRA adapter with the name and the commit of its base model on the Hugging Face Hub."""
    new = copy.copy(path) if isinstance(path, JobPath) else JobPath(path)
    new.base = base
    return new


def recorded_base(path: Path) -> str:
    """Return `JobPath.base`: the base model of the LoRA adapter at a path, or "" if no commit of it is recorded."""
    return path.base if isinstance(path, JobPath) else ""


def place_texts(document: object, folder: Path | str, *, job: Path | str | None = None) -> object:
    """Return a copy of a configuration document in which each text is a `JobText`. Relative paths start in `folder`,
    and runs store them relative to `job` (default: `folder`).

    If `folder` is empty, the document is returned unchanged. A text that is already a `JobText` is kept.
    """
    if folder == "":
        return document
    here = Path(folder).absolute()
    return _place(document, here, here if job is None else Path(job).absolute())


def _place(document: object, folder: Path, job: Path) -> object:
    def place(value: str) -> JobText:
        text = JobText(value)
        text.folder, text.job = folder, job
        return text

    return _replace_texts(document, place)


def place_hub_names(document: object, commits: Mapping[str, str], folder: Path | str) -> object:
    """Return a copy of a stored configuration in which each name on the Hugging Face Hub is a `RecordedName`. `commits`
    are the recorded commits by `HubPath.key`, and `folder` is the folder of the job."""
    by_text: dict[str, dict[str, str]] = {}
    for key, commit in commits.items():
        kind, _, text = key.partition(" ")
        by_text.setdefault(text, {})[kind] = commit

    def place(value: str) -> str:
        if value not in by_text:
            return value
        text = RecordedName(value)
        text.folder, text.job, text.commits = Path(folder), Path(folder), by_text[value]
        return text

    return _replace_texts(document, place)


def _replace_texts(document: object, change: Callable[[str], str]) -> object:
    match document:
        case str() if not isinstance(document, JobText):
            return change(document)
        case dict():
            return {key: _replace_texts(value, change) for key, value in document.items()}
        case list():
            return [_replace_texts(value, change) for value in document]
    return document


def _locate(value: object, info: ValidationInfo, kind: HubKind | None = None) -> object:
    """Convert a relative path in a configuration to an absolute path, and a name or address on the Hugging Face Hub to
    a `HubPath`. Other values are not changed.

    `kind` is the kind of repository that a name on the Hub means, or None if names are not allowed. A local path of the
    same name comes first. Raises ValueError if the kind of the location is not supported.
    """
    if not isinstance(value, str):
        return value
    if isinstance(value, RecordedName):
        address = parse_hub_address(value) if value.startswith(HF) else parse_hub_name(value, kind or "model")
        if (commit := value.commits.get(address.kind)) is not None:
            return HubPath.build(address.pin(commit), str(value), str(value.job))
    job = str(value.job) if isinstance(value, JobText) else ""
    if value.startswith(HF):
        return HubPath.build(parse_hub_address(value, kind), str(value), job)
    if (scheme := re.match(r"\w+://", value)) and scheme[0][:-2] not in _SCHEMES:
        raise ValueError(
            f"{value!s}: {scheme[0]} addresses are not supported. Use a local path, s3://, gs://, az:// or hf://, or "
            "download the file and set its path."
        )
    if scheme is None and kind is not None and is_hub_name(value) and info.context != RECORDED:
        is_local = Path(value).exists() or (isinstance(value, JobText) and JobPath.locate(value).exists())
        if not is_local:
            return HubPath.build(parse_hub_name(value, kind), str(value), job)
    if not isinstance(value, JobText) or scheme or Path(value).is_absolute():
        return str(value)
    path = JobPath.locate(value)
    if not path.exists() and Path(value).exists():
        return _locate_in_working_directory(value)
    return path


def _validate_location(
    value: object, read: Callable[[object], Path], info: ValidationInfo, kind: HubKind | None = None
) -> Path:
    """Validate a path or address in a configuration. `read` converts other texts to a path. `kind` is the kind of
    repository that a name on the Hugging Face Hub means, or None if names are not allowed."""
    if isinstance(value, str) and (match := _BASE.fullmatch(value)):
        return with_base(_validate_location(match[1], read, info, kind), match[2])
    place = _locate(value, info, kind)
    return place if isinstance(place, Path) else read(place)


def _validate_model(value: object, read: Callable[[object], Path], info: ValidationInfo) -> Path:
    return _validate_location(value, read, info, "model")


def _validate_dataset(value: object, read: Callable[[object], Path], info: ValidationInfo) -> Path:
    return _validate_location(value, read, info, "dataset")


def _locate_in_working_directory(text: JobText) -> JobPath:
    """Return the path of a text relative to the working directory, and warn that this is deprecated. Before version
    0.2, all relative paths started there."""
    path = JobPath(Path(text).absolute())
    path.relative, path.job = os.path.relpath(path, text.job), str(text.job)
    warnings.warn(
        f"{str(text)!r} exists only in the working directory. Relative paths in a job file start in the folder of the "
        f"file, {text.folder}. Write {os.path.relpath(path, text.folder)!r}, because a later version will not read the "
        "other path.",
        DeprecatedSpelling,
        stacklevel=2,
    )
    return path


def _locate_program(value: object, info: ValidationInfo) -> object:
    """Convert the relative path of a program in a configuration to an absolute path. A name without `/`, such as
    `python3`, is not changed, because it is searched in PATH."""
    if not isinstance(value, str) or "/" not in value:
        return value
    return _locate(value, info) if isinstance(value, JobText) else str(Path(value).absolute())


class PathNames:
    """Names under which a run stores the paths in its settings. A path that was relative in the job file is stored
    relative to the folder of the job.

    `recorded` is the configuration of an existing run. If it contains another name of a path (absolute, or relative to
    the working directory, as in older versions), this name is kept.
    """

    def __init__(self, settings: BaseModel, recorded: Mapping[str, JsonValue] | None = None) -> None:
        self._recorded = {_full(text): text for text in _texts(recorded or {})}
        found = [path for path in paths_in(settings) if isinstance(path, JobPath) and path.relative]
        self.folder = next((path.job for path in found if path.job), "")
        """Folder of the job, or "" if no path is relative to this folder."""
        self._parents = {str(path.parent): str(Path(path.relative).parent) for path in found}
        self._parents |= {str(path): path.relative for path in found}

    def name(self, path: Path) -> str:
        """Return the name under which a run stores a path. The path is in the settings, or below or next to a path in
        the settings."""
        text = self._relative(path) or format_path(path)
        return text if text in self._recorded.values() else self._recorded.get(_full(path), text)

    def _relative(self, path: Path) -> str:
        if isinstance(path, JobPath) and path.relative:
            return path.relative
        for parent in (path, *path.parents):
            if (start := self._parents.get(str(parent))) is not None:
                return os.path.normpath(Path(start, path.relative_to(parent)))
        return ""


def _full(path: Path | str) -> str:
    return os.path.normpath(Path(path).absolute())


def paths_in(value: object) -> Iterator[Path]:
    """Yield all paths that settings contain, at any depth."""
    match value:
        case Path():
            yield value
        case BaseModel():
            for _, part in value:
                yield from paths_in(part)
        case Mapping():
            for part in value.values():
                yield from paths_in(part)
        case tuple() | list():
            for part in value:
                yield from paths_in(part)


def _texts(value: JsonValue | Mapping[str, JsonValue]) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)


def _serialize(path: Path, info: SerializationInfo) -> str:
    if isinstance(info.context, PathNames):
        return info.context.name(path)
    return f"{format_path(path)}?base={base}" if (base := recorded_base(path)) else format_path(path)


_AS_TEXT: Final = PlainSerializer(_serialize, return_type=str, when_used="json")

Location = Annotated[Path, WrapValidator(_validate_location), _AS_TEXT]
"""Type of a path in a configuration: a path on this machine, or an address such as `s3://bucket/name` or
`hf://datasets/owner/name/file`. All paths in a configuration have the type `Location`, `ModelLocation`, `DataLocation`
or `Program`."""

ModelLocation = Annotated[Path, WrapValidator(_validate_model), _AS_TEXT]
"""Type of a model directory in a configuration: a `Location`, or the name `owner/name` of a model on the Hugging Face
Hub."""

DataLocation = Annotated[Path, WrapValidator(_validate_dataset), _AS_TEXT]
"""Type of a data file in a configuration: a `Location`, or the name `owner/name` of a dataset on the Hugging Face
Hub."""

Program = Annotated[Path, BeforeValidator(_locate_program), _AS_TEXT]
"""Type of a program in a configuration, given as a path with `/` or as a name that is searched in PATH."""


def read_model_path(text: str) -> Path:
    """Convert a command-line argument that names a model directory to a path. The text is a path on this machine, an
    address, or the name of a model on the Hugging Face Hub, as in a configuration.

    Raises BadInput if the address is not valid.
    """
    try:
        return TypeAdapter[Path](ModelLocation).validate_python(text)
    except ValidationError as error:
        raise BadInput(f"{text}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None


def fetch_path(path: Path) -> Path:
    """Return a local path of a file or directory. If it is in a bucket or on the Hugging Face Hub, it is first
    downloaded into the cache.

    Files of a cached directory that no longer exist in the bucket are deleted. If the path is a LoRA adapter with the
    recorded commit of its base model, the base model is fetched too, and the local path keeps the commit. Raises
    BadInput if the file or directory does not exist.
    """
    base = recorded_base(path)
    if is_on_hub(path):
        folder = fetch_snapshot(parse_hub_address(format_path(path)), base)
    else:
        folder = remote_files.fetch_address(format_path(path)) if is_remote(path) else path
        if base:
            find_hub_base(folder, base)
    return with_base(folder, base) if base else folder


def has_run(path: Path) -> bool:
    """Return whether a path or the address of a bucket is the directory of a run, that is, contains run.json."""
    if not is_remote(path):
        return (path / "run.json").is_file()
    address = format_path(path)
    return len(path.parts) > 1 and is_bucket_address(address) and open_store(address).exists("run.json")


def split_into_files(path: Path) -> list[Path]:
    """Return the paths of the files of which a data file consists. A dataset on the Hugging Face Hub may consist of
    several files. Every other path is a single file."""
    if not is_on_hub(path) or (address := parse_hub_address(format_path(path))).kind != "dataset" or address.file:
        return [path]
    address = replace(address, revision=resolve_commit(address))
    whole = replace(address, config="", split="")
    return [Path(replace(whole, file=name).text()) for name in split_files(address)]
