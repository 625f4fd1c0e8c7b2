"""Store in a directory of this machine."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

from rheostat.infra.errors import BadInput, Damaged, StoreFailed
from rheostat.infra.store.contracts import Entry, Lease, LockState, StoreTraits, check_key, is_key
from rheostat.infra.store.disk import (
    LIFELONG,
    TEMPORARY,
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


@dataclass(frozen=True, slots=True)
class LocalStore:
    """Store in a local directory. An object is written by creating a temporary file, syncing it, and adding a hard link
    with the object's key, which fails if the key exists. Then the directory is synced."""

    traits: ClassVar[StoreTraits] = StoreTraits(
        sends_requests=False, downloads=False, can_append=True, expires_locks=False, check_writes=False
    )
    root: Path
    is_required: bool = field(default=False, kw_only=True)
    """Whether the directory existed when the store was opened. Then it is not created again if it is deleted."""

    @property
    def uri(self) -> str:
        return self.root.as_uri()

    def requests(self) -> Mapping[str, int]:
        return {}

    def put(
        self,
        key: str,
        data: bytes | Path,
        *,
        durable: bool = True,
        cache: bool = False,
        on_progress: Callable[[], None] = lambda: None,
    ) -> bool:
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

    def staging(self) -> "LocalStore":
        return self

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


def open_local(root: Path) -> LocalStore:
    """Open the store in a directory. Raises BadInput if there is a file instead of a directory."""
    return LocalStore(checked_directory(root), is_required=root.is_dir())


def _moment(status: os.stat_result) -> datetime:
    return datetime.fromtimestamp(status.st_mtime, UTC)
