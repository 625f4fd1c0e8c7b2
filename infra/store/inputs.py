"""What settings name by path: files and directories of this machine, or of a bucket, brought here by the cache.

A path cannot hold the two slashes of `s3://`, so in a path an address has one; where it is written down it has both.
"""

from pathlib import Path
from typing import Annotated, Final

from pydantic import PlainSerializer

from infra.errors import BadInput
from infra.store.storage import open_store

_SCHEME: Final = "s3:"


def is_remote(path: Path) -> bool:
    """Whether a path is an address."""
    return path.parts[:1] == (_SCHEME,)


def written(path: Path) -> str:
    """Write a path down as a person would."""
    return f"{_SCHEME}//{'/'.join(path.parts[1:])}" if is_remote(path) else str(path)


Location = Annotated[Path, PlainSerializer(written, return_type=str, when_used="json")]
"""A path of this machine, or an address `s3://bucket/name`."""


def fetched(path: Path) -> Path:
    """Return the file or directory of this machine with what lies there now; one of a bucket has no other files."""
    if not is_remote(path):
        return path
    if len(path.parts) < 3:
        raise BadInput(f"{written(path)}: expected s3://bucket/name")
    store, name = open_store(written(path.parent)), path.name
    if store.exists(name):
        return store.local(name)
    keys = [entry.key for entry in store.entries(f"{name}/")]
    if not keys:
        raise BadInput(f"{written(path)}: expected a file, or a directory with files, found nothing")
    files = [store.local(key) for key in keys]
    directory = files[0].parents[keys[0].count("/") - 1]
    for other in directory.rglob("*"):
        if other.is_file() and other not in files:
            other.unlink(missing_ok=True)
    return directory


def has_run(path: Path) -> bool:
    """Whether a path is one of a run's directory."""
    if not is_remote(path):
        return (path / "run.json").is_file()
    return len(path.parts) > 1 and open_store(written(path)).exists("run.json")
