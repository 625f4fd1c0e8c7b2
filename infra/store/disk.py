"""Durable file operations of a local store. They are ordered in such a way that no reader ever finds an incomplete
file."""

import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import BinaryIO, Literal

from rheostat.infra.errors import BadInput
from rheostat.infra.store.contracts import LockState

TEMPORARY = ".tmp-"
"""Start of the names of temporary files in a store. Keys of objects cannot start with this prefix."""

_TURN_POLL_SECONDS = 0.005

_locked_descriptors: set[int] = set()
"""File descriptors of the locks that this process has. A forked child closes its copies of these descriptors, so that
the locks end with the parent process and not with the child."""


def read_lock_record(content: bytes, state: Literal["held", "left"]) -> LockState:
    """Return the state of a lock, together with the process that the content of the lock file names."""
    try:
        owner = json.loads(content)
        return LockState(state, f"process {owner['pid']} on {owner['host']}")
    except (ValueError, KeyError, TypeError):  # the process has the lock but has not written its name yet
        return LockState(state)


def sweep(root: Path) -> None:
    """Delete temporary files and directories in a store that were left by processes that have died.

    Live processes are recognized by the locks on their files. All temporary files are directly in the root, so the time
    does not depend on the size of the store.
    """
    for path in root.glob(f"{TEMPORARY}*"):
        is_directory = path.is_dir()
        try:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW if is_directory else os.O_RDWR
            descriptor = os.open(path, flags | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            continue
        if _try_lock(descriptor):
            if is_directory:
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        os.close(descriptor)


@contextmanager
def scratch_directory(root: Path) -> Iterator[Path]:
    """Run the block with a temporary directory in the store, for files that are not complete yet. The directory is
    deleted afterwards.

    If this process dies, the next `sweep` deletes the directory.
    """
    descriptor, path = _open_scratch(root)
    _close_locks_in_forks()
    _locked_descriptors.add(descriptor)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if descriptor in _locked_descriptors:
            _locked_descriptors.remove(descriptor)
            os.close(descriptor)


def _open_scratch(root: Path) -> tuple[int, Path]:
    while True:
        path = root / f"{TEMPORARY}{secrets.token_hex(8)}"
        path.mkdir(mode=0o700)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:  # a sweep deleted the directory before it was opened
            continue
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if path.is_dir():
            return descriptor, path
        os.close(descriptor)


class _LifelongLease:
    """Lock on a local file that the kernel guarantees until this process ends."""

    def check(self) -> None:
        """Do nothing, because a running process cannot lose a lock of the kernel."""


LIFELONG = _LifelongLease()


@contextmanager
def lock_file(path: Path) -> Iterator[bool]:
    """Run the block while this process has the lock on a file, and yield True. The file contains the id of this
    process. If another process has the lock, yield False.

    The lock ends when this process ends, at the latest. If the block ends normally, the name is removed from the file.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    _close_locks_in_forks()
    _locked_descriptors.add(descriptor)
    is_locked = False
    try:
        is_locked = _try_lock(descriptor)
        if is_locked:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        yield is_locked
    finally:
        if descriptor in _locked_descriptors:
            if is_locked:
                os.ftruncate(descriptor, 0)
            _locked_descriptors.remove(descriptor)
            os.close(descriptor)


def read_lock_state(path: Path) -> LockState:
    """Return the state of the lock on a file, and the process that has the lock. Nothing is written, but the file is
    locked (shared) for a moment."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return LockState("free")
    try:
        content = os.pread(descriptor, 4096, 0)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return read_lock_record(content, "held")
        return read_lock_record(content, "left") if content else LockState("free")
    finally:
        os.close(descriptor)


@cache
def _close_locks_in_forks() -> None:
    """Make every forked child of this process close its copies of the descriptors of locked files. Only the first call
    has an effect."""
    os.register_at_fork(after_in_child=_close_locked)


def _close_locked() -> None:
    while _locked_descriptors:
        os.close(_locked_descriptors.pop())


def publish_file(path: Path, data: bytes | Path, *, root: Path, durable: bool = True) -> bool:
    """Write a file to its final path in one step, by linking a complete temporary file to the path. Return False if the
    path already exists.

    A file from a scratch directory of the root is linked without being copied. With `durable=False`, the file is
    complete for all processes even if this process is killed. However, it may be incomplete after a power failure
    before the next sync.
    """
    if isinstance(data, Path) and _is_scratch(data, root=root):
        return _link_whole(data, path, durable=durable)
    descriptor, temporary = open_temporary(root)
    try:
        with os.fdopen(descriptor, "wb") as file:
            _write(data, file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
            os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _is_scratch(path: Path, *, root: Path) -> bool:
    return path.is_relative_to(root) and path.relative_to(root).parts[0].startswith(TEMPORARY)


def _link_whole(file: Path, path: Path, *, durable: bool) -> bool:
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if durable:
            os.fsync(descriptor)
        os.link(file, path)
    except FileExistsError:
        return False
    finally:
        os.close(descriptor)
    return True


def _write(data: bytes | Path, file: BinaryIO) -> None:
    if isinstance(data, bytes):
        file.write(data)
        return
    with data.open("rb") as source:
        shutil.copyfileobj(source, file, 1 << 20)


def open_temporary(directory: Path) -> tuple[int, Path]:
    """Create a temporary file, and return its file descriptor and its path. The file is locked until the descriptor is
    closed."""
    while True:
        path = directory / f"{TEMPORARY}{secrets.token_hex(8)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor, path
        os.close(descriptor)  # a sweep deleted the file between open and lock


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked_file(path: Path, *, seconds: float) -> Iterator[None]:
    """Run the block with a lock on the file at this path, which excludes other threads and processes. The file is
    deleted afterwards.

    If the lock is not available within `seconds`, the block runs without it.
    """
    deadline = time.monotonic() + seconds
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        while not (locked := _try_lock(descriptor)) and time.monotonic() < deadline:
            time.sleep(_TURN_POLL_SECONDS)
        if not locked or os.fstat(descriptor).st_nlink:
            break
        os.close(descriptor)  # the previous holder of the lock has deleted this file
    try:
        yield
    finally:
        if locked:
            path.unlink(missing_ok=True)
        os.close(descriptor)


def walk_files(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (directory, file name) for each file in a directory and its subdirectories. Temporary directories are
    skipped.

    A directory that is deleted in the meantime is skipped. Raises OSError if a directory cannot be read.
    """

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for directory, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [folder for folder in folders if not folder.startswith(TEMPORARY)]
        for name in names:
            yield directory, name


def remove_empty(path: Path, *, root: Path) -> Path:
    """Delete the directory `path` if it is empty, and then its parents up to `root` as long as they are empty too.
    Return the first directory that remains.

    If a file is written there later, its directories are created again.
    """
    while path != root:
        try:
            path.rmdir()
        except FileNotFoundError:
            pass
        except OSError:  # POSIX allows EEXIST and ENOTEMPTY for a directory that is not empty
            return path
        path = path.parent
    return root


def checked_directory(root: Path) -> Path:
    """Return the path of a store's directory, which need not exist. Raises BadInput if the path or one of its parents
    is a file."""
    nearest = _nearest(root)
    if not nearest.is_dir():
        raise BadInput(
            f"store {str(root)!r} must be a directory, but {str(nearest)!r} is a file. Choose another directory."
        )
    return root


def check_writable(root: Path) -> None:
    """Raise BadInput if this process is not allowed to write a store to this directory. Nothing is written, and the
    directory need not exist."""
    nearest = _nearest(root)
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise BadInput(
            f"store {str(root)!r} is not writable: this user has no write permission for {nearest}. Change its "
            "permissions, or choose another store (the key store, or --store)."
        )


def _nearest(path: Path) -> Path:
    """Return the path itself if it exists, otherwise its nearest parent directory that exists."""
    return next(each for each in (path, *path.parents) if each.exists() or each == each.parent)


def make_directory(path: Path, *, required: Path | None = None) -> None:
    """Create a directory and its parents, and make them durable (fsync). Raises FileNotFoundError if `required`, which
    is one of these directories, does not exist, because it was deleted."""
    if path.is_dir():
        return
    if path == required:
        raise FileNotFoundError(
            errno.ENOENT, "the directory of the store was deleted while the store was in use", str(path)
        )
    make_directory(path.parent, required=required)
    path.mkdir(exist_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file, or the entries of a directory, durable (fsync)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
