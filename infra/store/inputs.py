"""Paths in settings. A path names a file or directory on this machine, or in a bucket from which it is downloaded into
the cache.

A `Path` object cannot contain the two slashes of `s3://`. Therefore an address has one slash in a `Path` and two
slashes in text. A relative path in a job file starts in the folder of this file. If it exists only in the working
directory, this path is used, with a warning. A relative path on the command line starts in the working directory. All
become an absolute `JobPath`, which also stores the path relative to the folder of the job. A run records the relative
path, so that it can continue after its job and its files were moved to another folder.
"""

import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path, PosixPath
from typing import Annotated, Final, Self

from pydantic import BaseModel, BeforeValidator, JsonValue, PlainSerializer, SerializationInfo

from infra.errors import BadInput, DeprecatedSpelling
from infra.store.storage import open_store

_SCHEME: Final = "s3:"


def is_remote(path: Path) -> bool:
    """Return whether a path is an s3:// address."""
    return path.parts[:1] == (_SCHEME,)


def format_path(path: Path) -> str:
    """Return a path or an address as text. An address has two slashes after `s3:`."""
    return f"{_SCHEME}//{'/'.join(path.parts[1:])}" if is_remote(path) else str(path)


class JobText(str):
    """Text in a job file or an override, which may be a relative path. Such a path starts in `folder`, and is recorded
    relative to `job`."""

    folder: Path
    """Absolute path of the folder that contains the file with this text. For an override, this is the working
    directory."""
    job: Path
    """Absolute path of the folder that contains the job file."""


class JobPath(PosixPath):
    """Absolute path that was written as a relative path in a job file or an override. Paths derived from it are plain
    paths without both fields."""

    relative: str = ""
    """Path relative to the folder of the job."""
    job: str = ""
    """Folder of the job."""

    @classmethod
    def locate(cls, text: JobText) -> Self:
        """Return the absolute path for a text that contains a relative path."""
        path = cls(text.folder / text)
        path.relative, path.job = os.path.relpath(path, text.job), str(text.job)
        return path

    def __reduce__(self) -> tuple[object, ...]:
        """Return the state for copying and pickling, so that both fields are kept."""
        return type(self), (str(self),), self.__dict__


def place_texts(document: object, folder: Path | str, *, job: Path | str | None = None) -> object:
    """Return a copy of a document in which each text is a `JobText`. Relative paths start in `folder`, and are recorded
    relative to `job` (default: `folder`).

    If `folder` is empty, the document is returned unchanged. A text that is already a `JobText` is kept.
    """
    if folder == "":
        return document
    here = Path(folder).absolute()
    return _place(document, here, here if job is None else Path(job).absolute())


def _place(document: object, folder: Path, job: Path) -> object:
    match document:
        case str() if not isinstance(document, JobText):
            text = JobText(document)
            text.folder, text.job = folder, job
            return text
        case dict():
            return {key: _place(value, folder, job) for key, value in document.items()}
        case list():
            return [_place(value, folder, job) for value in document]
    return document


def _locate(value: object) -> object:
    """Convert a relative path in a `JobText` to an absolute path. Raises ValueError if the kind of the location is not
    supported."""
    if isinstance(value, str) and (scheme := re.match(r"(?!s3:)\w+://", value)):
        raise ValueError(
            f"{value!s}: {scheme[0]} addresses are not supported. Download the file and set its path, or copy it to a "
            "bucket and set s3://bucket/file."
        )
    if not isinstance(value, JobText) or value.startswith("s3://") or Path(value).is_absolute():
        return str(value) if isinstance(value, JobText) else value
    path = JobPath.locate(value)
    if not path.exists() and Path(value).exists():
        return _locate_in_working_directory(value)
    return path


def _locate_in_working_directory(text: JobText) -> JobPath:
    """Return the path in the working directory, in which all relative paths started before version 0.2, and warn."""
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


def _locate_program(value: object) -> object:
    """Convert the relative path of a program to an absolute path. A name without `/` is searched in PATH."""
    if not isinstance(value, str) or "/" not in value:
        return value
    return _locate(value) if isinstance(value, JobText) else str(Path(value).absolute())


class PathNames:
    """Names under which a run records the paths of its settings. A path that was relative in the job is recorded
    relative to the folder of the job.

    `recorded` is the configuration of an existing run. If it contains another name of a path (absolute, or relative to
    the working directory, as in older versions), this name is kept.
    """

    def __init__(self, settings: BaseModel, recorded: Mapping[str, JsonValue] | None = None) -> None:
        self._recorded = {_full(text): text for text in _texts(recorded or {})}
        found = [path for path in paths_in(settings) if isinstance(path, JobPath) and path.relative]
        self.folder = next((path.job for path in found), "")
        """Folder of the job, or "" if no path is relative to this folder."""
        self._parents = {str(path.parent): str(Path(path.relative).parent) for path in found}
        self._parents |= {str(path): path.relative for path in found}

    def name(self, path: Path) -> str:
        """Return the recorded name of a path in the settings, or of a path that is below or next to such a path."""
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
    """Yield all paths that settings contain."""
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
    return info.context.name(path) if isinstance(info.context, PathNames) else format_path(path)


_AS_TEXT: Final = PlainSerializer(_serialize, return_type=str, when_used="json")

Location = Annotated[Path, BeforeValidator(_locate), _AS_TEXT]
"""Path on this machine, or an address `s3://bucket/name`. All paths in a configuration have the type `Location`,
`LocalPath` or `Program`."""

LocalPath = Annotated[Path, BeforeValidator(_locate), _AS_TEXT]
"""Path on this machine."""

Program = Annotated[Path, BeforeValidator(_locate_program), _AS_TEXT]
"""Program, given as a path with `/` or as a name that is searched in PATH."""


def fetch_path(path: Path) -> Path:
    """Return a local path of a file or directory. If it is in a bucket, it is downloaded into the cache first.

    Files of a cached directory that no longer exist in the bucket are deleted. Raises BadInput if the file or directory
    does not exist.
    """
    if not is_remote(path):
        return path
    if len(path.parts) < 3:
        raise BadInput(f"{format_path(path)} is not the address of a file in a bucket. Write it like s3://bucket/name")
    store, name = open_store(format_path(path.parent)), path.name
    if store.exists(name):
        return store.local_path(name)
    keys = [entry.key for entry in store.entries(f"{name}/")]
    if not keys:
        raise BadInput(
            f"{format_path(path)} does not exist: there is neither a file nor a directory with files at this address. "
            "Check the names of the bucket and the file."
        )
    files = [store.local_path(key) for key in keys]
    directory = files[0].parents[keys[0].count("/") - 1]
    for other in directory.rglob("*"):
        if other.is_file() and other not in files:
            other.unlink(missing_ok=True)
    return directory


def has_run(path: Path) -> bool:
    """Return whether a path is the directory of a run, that is, contains a run record."""
    if not is_remote(path):
        return (path / "run.json").is_file()
    return len(path.parts) > 1 and open_store(format_path(path)).exists("run.json")
