"""Stores of immutable objects, in which runs keep shards, bundles and manifests. A store is opened by its URI. An
object becomes visible when it is complete, and never changes afterwards. If several processes write the same key at the
same time, exactly one of them succeeds."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit
from urllib.request import url2pathname

from infra.errors import BadInput, Damaged, StoreFailed
from infra.store.disk import (
    LIFELONG,
    TEMPORARY,
    LockState,
    check_writable,
    checked_directory,
    lock_file,
    make_directory,
    publish_file,
    read_lock_state,
    remove_empty,
    scratch_directory,
    sweep,
    sync,
    walk_files,
)

_SEGMENT = r"[A-Za-z0-9_][A-Za-z0-9._=+-]*"
_KEY = re.compile(rf"{_SEGMENT}(/{_SEGMENT})*")


@dataclass(frozen=True, slots=True)
class Entry:
    """Entry of a listing: the key of a stored object, its size in bytes, and the time of its last write."""

    key: str
    bytes: int
    modified: datetime
    """Time of the last write, by the clock of the store."""


class Objects(Protocol):
    """Store of immutable objects, each with a unique key. Implemented by `LocalStore` and `S3Store`. Every method
    raises StoreFailed if the disk or server fails, and BadInput if a key is not valid."""

    @property
    def uri(self) -> str:
        """Address with which other processes can open the same store."""
        ...

    @property
    def is_remote(self) -> bool:
        """Whether each operation sends a network request. Callers that must not block then use a thread."""
        ...

    def requests(self) -> Mapping[str, int]:
        """Return the number of requests sent so far, by HTTP verb. Empty if the store is local."""
        ...

    def put(self, key: str, data: bytes | Path, *, durable: bool = True, cache: bool = False) -> bool:
        """Write an object if its key is free. Return False and change nothing if the key is taken. With `cache`, bytes
        are also added to the local cache (files always are). Files in the store's scratch directory are moved, not
        copied. With `durable=False`, the object is complete for all processes, but a power failure before `sync` may
        damage it."""
        ...

    def sync(self, key: str) -> None:
        """Make an object durable (fsync the file and its directory)."""
        ...

    def find(self, key: str) -> bytes | None:
        """Return the bytes of an object, or None if it does not exist."""
        ...

    def read(self, key: str) -> bytes:
        """Return the bytes of an object. Raises Damaged if the object does not exist."""
        ...

    def entries(self, prefix: str) -> list[Entry]:
        """Return all complete objects whose keys start with the prefix, sorted by key."""
        ...

    def children(self, folder: str) -> list[str]:
        """Return the sorted names directly below a folder. The root folder is ""."""
        ...

    def strays(self) -> list[str]:
        """Return the sorted names of files in the store that are not objects, such as backups of an editor."""
        ...

    def locate(self, key: str) -> str:
        """Return the path or address of an object, for messages. Raises Damaged if the object does not exist."""
        ...

    def now(self) -> datetime:
        """Return the current time by the clock of the store, for comparisons with the times of objects."""
        ...

    def check(self) -> None:
        """Raise BadInput if the store is not writable or cannot prevent overwriting. No object is stored."""
        ...

    def exists(self, key: str) -> bool:
        """Return whether an object exists."""
        ...

    def exist(self, keys: Sequence[str]) -> list[bool]:
        """Return whether each of these objects exists. A remote store is queried in parallel."""
        ...

    def delete(self, key: str) -> None:
        """Delete an object, and its folders if they become empty. Do nothing if it does not exist."""
        ...


class LocalFiles(Protocol):
    """Access to objects as local files, for libraries that read files or map them into memory."""

    def local_path(self, key: str) -> Path:
        """Return a local file with the content of an object. Objects of one folder have files in one folder."""
        ...

    def cached_copy(self, key: str) -> Path | None:
        """Return the cached local copy of an object, or None. No request is sent to the store. Only objects that this
        process has put, opened with `local_path` or passed to `fetch` are found. `LocalStore` always returns None."""
        ...

    def fetch(self, keys: Iterable[str], *, room: int | None = None) -> None:
        """Download objects that are known to exist into the local cache, in parallel. If `room` (the total size in
        bytes) is given, nothing is downloaded unless the cache has room for that many bytes. `LocalStore` does
        nothing."""
        ...

    def scratch(self) -> AbstractContextManager[Path]:
        """Run the block with a temporary local directory for files that will be put into the store. The directory is
        deleted afterwards. If this process is killed, the next process that locks the store deletes the directory."""
        ...


class Lease(Protocol):
    """Lock on a key of the store that only this process has, with a method that checks whether it still has it."""

    def check(self) -> None:
        """Raise Fenced if another process may have taken over the lock."""
        ...


class Leases(Protocol):
    """Locks on keys of the store. Only one process at a time can have the lock on a key."""

    def lock(self, key: str) -> AbstractContextManager[Lease | None]:
        """Run the block with a lock on a key, and yield the lock, or None if another process has it. The lock ends with
        the process at the latest. A record in the store names the process. Temporary files of dead processes are
        deleted."""
        ...

    def lock_state(self, key: str) -> LockState:
        """Return whether a key is locked, and which process has the lock. Nothing is written."""
        ...


class Store(Objects, LocalFiles, Leases, Protocol):
    """Complete interface of a store. Functions that need only a part of it use one of its base protocols."""


URI_FORMS = "write a path, file:///path or s3://bucket/prefix"


def open_store(uri: str) -> Store:
    """Open the store at a path, or at a file:// or s3:// address. Nothing is written until the first object is put.
    Raises BadInput if the address is not valid or is a file."""
    if not uri or "::" in uri:
        raise BadInput(f"store {uri!r} is not a valid address: {URI_FORMS}, without '::' chains")
    scheme, separator, _ = uri.partition("://")
    if not separator:
        return _open_local(Path(uri).expanduser().resolve())
    if scheme == "s3":
        from infra.store.s3 import open_s3  # importing the S3 client takes 0.1 s

        return open_s3(uri)
    parts = urlsplit(uri)
    if scheme != "file":
        raise BadInput(f"store {uri!r} is not a valid address: {URI_FORMS}")
    if parts.netloc not in ("", "localhost"):
        raise BadInput(f"store {uri!r}: a file:// address must not contain a host. Write file:///absolute/path.")
    return _open_local(Path(url2pathname(parts.path)).resolve())


def _open_local(root: Path) -> "LocalStore":
    return LocalStore(checked_directory(root), is_required=root.is_dir())


def _moment(status: os.stat_result) -> datetime:
    return datetime.fromtimestamp(status.st_mtime, UTC)


def is_key(key: str) -> bool:
    """Return whether a name is a valid key of an object. Names of hidden files and of backups are not."""
    return _KEY.fullmatch(key) is not None and ".." not in key


def check_key(key: str) -> None:
    """Raise BadInput if a key is not valid, for example because it contains `..` or begins with a dot."""
    if not is_key(key):
        raise BadInput(f"the key {key!r} is not valid. Keys are parts like {_SEGMENT} joined by '/', without '..'")


@dataclass(frozen=True, slots=True)
class LocalStore:
    """Store in a local directory. An object is written by creating a temporary file, syncing it, and adding a hard link
    with the object's key, which fails if the key exists. Then the directory is synced."""

    root: Path
    is_required: bool = field(default=False, kw_only=True)
    """Whether the directory existed when the store was opened. Then it is not created again if it is deleted."""

    @property
    def uri(self) -> str:
        return self.root.as_uri()

    @property
    def is_remote(self) -> bool:
        return False

    def requests(self) -> Mapping[str, int]:
        return {}

    def put(self, key: str, data: bytes | Path, *, durable: bool = True, cache: bool = False) -> bool:
        path = self._own_path(key)
        with self._failures(f"cannot write {key!r}"):
            try:
                make_directory(path.parent, required=self._required)
                won = not path.exists() and publish_file(path, data, root=self.root, durable=durable)
            except FileNotFoundError:
                if path.parent.is_dir() or (self.is_required and not self.root.is_dir()):
                    raise
                # Another process deleted the folder because it was empty.
                return self.put(key, data, durable=durable)
            if durable:  # also after a lost race: the caller may rely on the existing object
                with suppress(FileNotFoundError):  # another process has deleted the object and its empty folder
                    sync(path.parent)
            return won

    def sync(self, key: str) -> None:
        path = self.local_path(key)
        with self._failures(f"cannot sync {key!r}"):
            sync(path)
            sync(path.parent)

    def find(self, key: str) -> bytes | None:
        with suppress(Damaged):
            return self.read(key)
        return self.read(key) if self.exists(key) else None

    def read(self, key: str) -> bytes:
        with self._failures(f"cannot read {key!r}"):
            while True:
                with suppress(FileNotFoundError):  # deleted since it was located: `local_path` finds it missing
                    return self.local_path(key).read_bytes()

    def local_path(self, key: str) -> Path:
        path = self._path(key)
        if not path.is_file():
            raise Damaged(f"{key!r} is missing from {self.uri}. Restore the file from a copy of the store.")
        if link := self._link_to(path):
            raise Damaged(f"{key!r} in {self.uri} must be a plain file, but its path contains the symbolic link {link}")
        return path

    def cached_copy(self, key: str) -> Path | None:
        return None

    def fetch(self, keys: Iterable[str], *, room: int | None = None) -> None:
        """Do nothing, because the objects are local files already."""

    def entries(self, prefix: str) -> list[Entry]:
        with self._failures(f"cannot list {prefix!r}"):
            return sorted(self._walk(prefix), key=lambda entry: entry.key)

    def children(self, folder: str) -> list[str]:
        path = self._path(folder) if folder else self.root
        with self._failures(f"cannot list {folder!r}"):
            try:
                return sorted(child.name for child in path.iterdir() if is_key(child.name))
            except FileNotFoundError:
                return []

    def strays(self) -> list[str]:
        with self._failures("cannot list the files"):
            names = (Path(directory, name).relative_to(self.root).as_posix() for directory, name in self._files(""))
            return sorted(name for name in names if not is_key(name))

    def locate(self, key: str) -> str:
        return str(self.local_path(key))

    def now(self) -> datetime:
        with self._failures("cannot read the clock of the store"), self.scratch() as directory:
            return _moment(directory.stat())

    def check(self) -> None:
        """Raise BadInput if the directory is not writable. Hard links are not tested before the first write."""
        check_writable(self.root)

    def exists(self, key: str) -> bool:
        return self._path(key).is_file()

    def exist(self, keys: Sequence[str]) -> list[bool]:
        return [self.exists(key) for key in keys]

    def delete(self, key: str) -> None:
        path = self._own_path(key)
        with self._failures(f"cannot delete {key!r}"):
            try:
                path.unlink()
            except FileNotFoundError:
                return
            with suppress(FileNotFoundError):  # another process has deleted that folder and syncs its parent
                sync(remove_empty(path.parent, root=self.root))

    @contextmanager
    def lock(self, key: str) -> Iterator[Lease | None]:
        path = self._own_path(key)
        with ExitStack() as stack:
            with self._failures(f"cannot lock {key!r}"):
                make_directory(path.parent, required=self._required)
                is_locked = stack.enter_context(lock_file(path))
                if is_locked:
                    sweep(self.root)
            yield LIFELONG if is_locked else None
            if is_locked:  # delete temporary files of processes that died meanwhile
                with self._failures("cannot delete temporary files"):
                    sweep(self.root)

    def lock_state(self, key: str) -> LockState:
        with self._failures(f"cannot check the lock {key!r}"):
            return read_lock_state(self._path(key))

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        with ExitStack() as stack:
            with self._failures("cannot create a scratch directory"):
                make_directory(self.root, required=self._required)
                sweep(self.root)  # a store that is never locked, such as a registry, is only swept here
                directory = stack.enter_context(scratch_directory(self.root))
            yield directory

    def _path(self, key: str) -> Path:
        check_key(key)
        return self.root / key

    @property
    def _required(self) -> Path | None:
        return self.root if self.is_required else None

    def _own_path(self, key: str) -> Path:
        """Return the path at which to write or delete an object. Raises BadInput if it contains a symbolic link."""
        path = self._path(key)
        if link := self._link_to(path):
            raise BadInput(
                f"store {self.uri}: {key!r} cannot be changed, because its path contains the symbolic link {link}. "
                "Remove the link."
            )
        return path

    def _link_to(self, path: Path) -> Path | None:
        """Return the first symbolic link on the path from the store's root to an object, or None. The root itself may
        be a symbolic link."""
        ways = [path, *path.parents][: len(path.relative_to(self.root).parts)]
        return next((way for way in ways if way.is_symlink()), None)

    def _walk(self, prefix: str) -> Iterator[Entry]:
        if prefix:
            check_key(prefix.removesuffix("/"))
        for directory, name in self._files(prefix.rpartition("/")[0]):
            path = Path(directory, name)
            key = path.relative_to(self.root).as_posix()
            if not is_key(key) or not key.startswith(prefix):
                continue
            try:
                status = path.stat()
            except FileNotFoundError:  # deleted since the directory was listed
                continue
            yield Entry(key, status.st_size, _moment(status))

    def _files(self, folder: str) -> Iterator[tuple[str, str]]:
        """Yield (directory, file name) for each file below a folder. Temporary files are skipped."""
        files = walk_files(self.root / folder)
        return ((directory, name) for directory, name in files if not name.startswith(TEMPORARY))

    @contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreFailed(f"store {self.uri}: {what}: {error}") from error
