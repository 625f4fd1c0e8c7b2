"""Interface of stores of immutable objects, in which runs keep shards, bundles and manifests. An object becomes visible
when it is complete, and never changes afterwards. If several processes write the same key at the same time, exactly one
of them succeeds."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, Protocol

from rheostat.infra.errors import BadInput

_SEGMENT = r"[A-Za-z0-9_][A-Za-z0-9._=+-]*"
_KEY = re.compile(rf"{_SEGMENT}(/{_SEGMENT})*")


@dataclass(frozen=True, slots=True)
class Entry:
    """Entry of a listing: the key of a stored object, its size in bytes, and the time of its last write."""

    key: str
    bytes: int
    modified: datetime
    """Time of the last write, by the clock of the store."""


@dataclass(frozen=True, slots=True)
class LockState:
    """State of a lock: "held" by a live process, "left" behind by a process that died, or "free"."""

    state: Literal["held", "left", "free"]
    who: str = ""
    """Process and machine that have the lock, such as `process 12 on host`. Empty if they are not known."""


@dataclass(frozen=True, slots=True)
class StoreTraits:
    """Properties in which kinds of stores differ. Code that uses a store asks for the property on which it depends."""

    sends_requests: bool
    """Whether operations send network requests. Callers that must not block then use a thread."""
    downloads: bool
    """Whether an object must be downloaded before a library can read it as a local file."""
    can_append: bool
    """Whether lines can be appended to a file of the store."""
    expires_locks: bool
    """Whether a lock expires unless its process renews it."""
    check_writes: bool
    """Whether `check` writes objects, which it deletes again."""


class Objects(Protocol):
    """Store of immutable objects, each with a unique key. Implemented by `LocalStore`, `BucketStore` and, for forks,
    `SharedStore`. Every method raises StoreFailed if the disk or server fails, and BadInput if a key is not valid."""

    @property
    def traits(self) -> StoreTraits:
        """Properties of this kind of store."""
        ...

    @property
    def uri(self) -> str:
        """Address with which other processes can open the same store."""
        ...

    def requests(self) -> Mapping[str, int]:
        """Return the number of requests sent so far, by HTTP verb. Empty if the store sends no
        requests."""
        ...

    def put(
        self,
        key: str,
        data: bytes | Path,
        *,
        durable: bool = True,
        cache: bool = False,
        on_progress: Callable[[], None] = lambda: None,
    ) -> bool:
        """Write an object if its key is free. Return False and change nothing if the key is taken. With `cache`, bytes
        are also added to the local cache (files always are). Files in the store's scratch directory are moved, not
        copied. With `durable=False`, the object is complete for all processes, but a power failure before `sync` may
        damage it. `on_progress` is called after each part of a large upload."""
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
        """Return whether each of these objects exists. A store that sends requests is queried in parallel."""
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

    def staging(self) -> "Store":
        """Return a store on this machine in which files can be read before they are uploaded to this store. It has the
        files in the directories where this store would cache them. `LocalStore` returns itself."""
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


def is_key(key: str) -> bool:
    """Return whether a name is a valid key of an object. Names of hidden files and of backups are not."""
    return _KEY.fullmatch(key) is not None and ".." not in key


def check_key(key: str) -> None:
    """Raise BadInput if a key is not valid, for example because it contains `..` or begins with a dot."""
    if not is_key(key):
        raise BadInput(f"the key {key!r} is not valid. Keys are parts like {_SEGMENT} joined by '/', without '..'")
