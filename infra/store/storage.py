"""Put-if-absent stores addressed by URI: the one contract on which runs, shards and manifests stand.

An object appears whole or not at all and never changes afterwards; of many writers of one name exactly one wins.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit
from urllib.request import url2pathname

from infra.errors import BadInput, Damaged, StoreFailed
from infra.store.disk import (
    TEMPORARY,
    Holding,
    check_writable,
    checked_directory,
    hold_file,
    look_at_hold,
    make_directory,
    publish_file,
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
    """An object as a listing shows it."""

    key: str
    bytes: int
    modified: datetime
    """When it was written, by the store's own clock."""


class Objects(Protocol):
    """Immutable objects under names; every method raises StoreFailed where the medium itself fails."""

    @property
    def uri(self) -> str:
        """Opens the same store in another process."""
        ...

    @property
    def is_remote(self) -> bool:
        """Whether each answer takes its way through a network, so that who has others waiting asks from a thread."""
        ...

    def requests(self) -> Mapping[str, int]:
        """How many requests this object has sent by now, by verb; none where the medium is a disk."""
        ...

    def put(self, key: str, data: bytes | Path, *, durable: bool = True, kept: bool = False) -> bool:
        """Write if the name is free; False, with nothing changed, if it is taken.

        What is to be `kept` has its local file at hand afterwards, as every file that was put has.
        A file of a scratch directory of the store becomes the object itself: nothing is copied. What is not put durably
        is whole for all processes, and may be torn after a power cut unless it is synced before.
        """
        ...

    def sync(self, key: str) -> None:
        """Have an object survive a power cut."""
        ...

    def find(self, key: str) -> bytes | None:
        """Return the object, if there is one."""
        ...

    def read(self, key: str) -> bytes:
        """Return the object, or raise Damaged if there is none."""
        ...

    def entries(self, prefix: str) -> list[Entry]:
        """Return all objects whose key starts with the prefix, sorted by key, never a half-written one."""
        ...

    def children(self, folder: str) -> list[str]:
        """Return the sorted names directly under a folder; "" is the root."""
        ...

    def strays(self) -> list[str]:
        """Return the sorted names of files that are no objects: those of file managers, editors, file systems."""
        ...

    def locate(self, key: str) -> str:
        """Say where people find the object: a path, or an address. Raises Damaged if there is none."""
        ...

    def now(self) -> datetime:
        """Ask the store's own clock, of which nothing but ages is to be told."""
        ...

    def check(self) -> None:
        """Raise BadInput, before anything is written, where the medium does not keep these promises."""
        ...

    def exists(self, key: str) -> bool:
        """Return whether the object is there."""
        ...

    def exist(self, keys: Sequence[str]) -> list[bool]:
        """Return of each whether it is there, asked side by side."""
        ...

    def delete(self, key: str) -> None:
        """Remove the object, and the folders that it leaves empty; one that is already gone is fine."""
        ...


class LocalFiles(Protocol):
    """Objects as files of this machine, for libraries that read files or map them into memory."""

    def local(self, key: str) -> Path:
        """Return a local file with the object's bytes; objects that share a folder share one here too."""
        ...

    def held(self, key: str) -> Path | None:
        """Return this machine's copy of an object that this process has put, asked for or been told of, if it has one.

        Nobody is asked whether it is still the same; a store whose files are the objects has no copies.
        """
        ...

    def fetch(self, keys: Iterable[str], *, room: int | None = None) -> None:
        """Have copies of objects on this machine, side by side, where files are copies; the caller knows of them.

        Where `room` says how many bytes they have, they are fetched only if there is so much for what may be used.
        """
        ...

    def scratch(self) -> AbstractContextManager[Path]:
        """Make a local directory for what will be put; it is gone afterwards, or at the next hold after a kill."""
        ...


class Lease(Protocol):
    """A name that this process holds alone."""

    def check(self) -> None:
        """Raise Fenced once another process may have taken the name."""
        ...


class Leases(Protocol):
    """Names that one process holds at a time."""

    def hold(self, key: str) -> AbstractContextManager[Lease | None]:
        """Hold a name for this process alone, at most for its life; None when another has it. Leftovers are swept.

        Who holds it can be read under the name.
        """
        ...

    def look_at(self, key: str) -> Holding:
        """Say who holds a name, or died with it; nothing is written."""
        ...


class Store(Objects, LocalFiles, Leases, Protocol):
    """All that a run stands on; a function that needs a part of it asks for that part."""


EXPECTED = "expected a path, file:// or s3://bucket/prefix"


def open_store(uri: str) -> Store:
    """Open a store by path, file:// or s3:// address; nothing is written before the first put."""
    if not uri or "::" in uri:
        raise BadInput(f"store {uri!r}: {EXPECTED}, without '::' chains")
    scheme, separator, _ = uri.partition("://")
    if not separator:
        return LocalStore(checked_directory(Path(uri).expanduser().resolve()))
    if scheme == "s3":
        from infra.store.s3 import open_s3  # what speaks S3 takes 0.1 s to import

        return open_s3(uri)
    parts = urlsplit(uri)
    if scheme != "file":
        raise BadInput(f"store {uri!r}: {EXPECTED}")
    if parts.netloc not in ("", "localhost"):
        raise BadInput(f"store {uri!r}: file:// names no host: expected file:///absolute/path")
    return LocalStore(checked_directory(Path(url2pathname(parts.path)).resolve()))


def _moment(status: os.stat_result) -> datetime:
    return datetime.fromtimestamp(status.st_mtime, UTC)


def is_key(key: str) -> bool:
    """Whether a name is one of an object: hidden files and editors' backups are not."""
    return _KEY.fullmatch(key) is not None and ".." not in key


def check_key(key: str) -> None:
    """Refuse a name that could leave the store or be taken for a temporary file."""
    if not is_key(key):
        raise BadInput(f"key {key!r}: expected segments like {_SEGMENT} joined by '/', without '..'")


class _LifelongLease:
    """The kernel's: lost with its process alone, so that whoever can ask still has it."""

    def check(self) -> None:
        """Find nothing to complain of."""


_LIFELONG = _LifelongLease()


@dataclass(frozen=True, slots=True)
class LocalStore:
    """A store in a directory: temporary file, fsync, link (fails if the name exists), fsync of the directory."""

    root: Path

    @property
    def uri(self) -> str:
        return self.root.as_uri()

    @property
    def is_remote(self) -> bool:
        return False

    def requests(self) -> Mapping[str, int]:
        return {}

    def put(self, key: str, data: bytes | Path, *, durable: bool = True, kept: bool = False) -> bool:
        path = self._own_path(key)
        with self._failures(f"cannot write {key!r}"):
            try:
                make_directory(path.parent)
                won = not path.exists() and publish_file(path, data, root=self.root, durable=durable)
            except FileNotFoundError:
                if path.parent.is_dir():
                    raise
                return self.put(key, data, durable=durable)  # its empty folder has been removed meanwhile
            if durable:  # also for the loser: what it is told exists must survive a power cut
                with suppress(FileNotFoundError):  # another has taken it already, and its empty folder
                    sync(path.parent)
            return won

    def sync(self, key: str) -> None:
        path = self.local(key)
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
                with suppress(FileNotFoundError):  # deleted since it was located: `local` finds it missing
                    return self.local(key).read_bytes()

    def local(self, key: str) -> Path:
        path = self._path(key)
        if not path.is_file():
            raise Damaged(f"{key!r} is missing from {self.uri}")
        if link := self._link_to(path):
            raise Damaged(f"{key!r} in {self.uri}: expected a plain file, found the symbolic link {link}")
        return path

    def held(self, key: str) -> Path | None:
        return None

    def fetch(self, keys: Iterable[str], *, room: int | None = None) -> None:
        """Do nothing: files are the objects themselves."""

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
        with self._failures("cannot list what is there"):
            names = (Path(directory, name).relative_to(self.root).as_posix() for directory, name in self._files(""))
            return sorted(name for name in names if not is_key(name))

    def locate(self, key: str) -> str:
        return str(self.local(key))

    def now(self) -> datetime:
        with self._failures("cannot ask for the time"), self.scratch() as directory:
            return _moment(directory.stat())

    def check(self) -> None:
        """Find nothing to complain of but a place without room for us: a file system has links, or fails at a put."""
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
            with suppress(FileNotFoundError):  # another has removed that folder, and syncs the one around it
                sync(remove_empty(path.parent, root=self.root))

    @contextmanager
    def hold(self, key: str) -> Iterator[Lease | None]:
        path = self._own_path(key)
        with ExitStack() as stack:
            with self._failures(f"cannot hold {key!r}"):
                make_directory(path.parent)
                held = stack.enter_context(hold_file(path))
                if held:
                    sweep(self.root)
            yield _LIFELONG if held else None
            if held:  # processes that died meanwhile left theirs
                with self._failures(f"cannot sweep {key!r}"):
                    sweep(self.root)

    def look_at(self, key: str) -> Holding:
        with self._failures(f"cannot look at {key!r}"):
            return look_at_hold(self._path(key))

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        with ExitStack() as stack:
            with self._failures("cannot make a scratch directory"):
                make_directory(self.root)
                sweep(self.root)  # what nobody holds, such as a registry, has no other occasion
                directory = stack.enter_context(scratch_directory(self.root))
            yield directory

    def _path(self, key: str) -> Path:
        check_key(key)
        return self.root / key

    def _own_path(self, key: str) -> Path:
        """Return where an object is written or removed: in the store itself, and not where a link leads to."""
        path = self._path(key)
        if link := self._link_to(path):
            raise BadInput(
                f"store {self.uri}: {key!r} would be changed through the symbolic link {link}, expected a file or "
                "folder of the store's own; remove the link"
            )
        return path

    def _link_to(self, path: Path) -> Path | None:
        """Find a symbolic link among an object and the folders between it and the root, which may be one itself."""
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
            except FileNotFoundError:  # deleted since the directory was read
                continue
            yield Entry(key, status.st_size, _moment(status))

    def _files(self, folder: str) -> Iterator[tuple[str, str]]:
        """Walk (directory, file name) pairs below a folder, those of writers that are at work left out."""
        found = walk_files(self.root / folder)
        return ((directory, name) for directory, name in found if not name.startswith(TEMPORARY))

    @contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreFailed(f"store {self.uri}: {what}: {error}") from error
