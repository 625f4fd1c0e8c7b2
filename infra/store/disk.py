"""Durable files: what a local store does to a directory, and in which order, so that nothing torn is ever seen."""

import fcntl
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO, Literal

from infra.errors import BadInput

TEMPORARY = ".tmp-"
"""How names of temporary files begin; keys of a store cannot."""

_TURN_POLL_SECONDS = 0.005

_held: set[int] = set()
"""Descriptors of the files that this process holds. A forked child inherits them, and would keep a dead parent's."""


@dataclass(frozen=True, slots=True)
class Holding:
    """Whether a name is held: by a live process, or left by one that died with it."""

    state: Literal["held", "left", "free"]
    who: str = ""
    """`process 12 on host`; nothing where nobody is known."""


def holding_of(content: bytes, state: Literal["held", "left"]) -> Holding:
    """Say who is named in what a holder writes."""
    try:
        told = json.loads(content)
        return Holding(state, f"process {told['pid']} on {told['host']}")
    except (ValueError, KeyError, TypeError):  # it holds the name and has not written its own yet
        return Holding(state)


def sweep(root: Path) -> None:
    """Remove temporary files and scratch directories whose writers are dead; a live writer holds a lock on its own.

    All of them lie directly in the root, so that this takes no longer in a large store.
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
    """Make a directory below the root for what is not complete yet; it is gone afterwards.

    If this process dies before, the next sweep removes it.
    """
    descriptor, path = _open_scratch(root)
    _drop_inherited_holds()
    _held.add(descriptor)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if descriptor in _held:
            _held.remove(descriptor)
            os.close(descriptor)


def _open_scratch(root: Path) -> tuple[int, Path]:
    while True:
        path = root / f"{TEMPORARY}{secrets.token_hex(8)}"
        path.mkdir(mode=0o700)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:  # a sweep came between
            continue
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if path.is_dir():
            return descriptor, path
        os.close(descriptor)


@contextmanager
def hold_file(path: Path) -> Iterator[bool]:
    """Lock a file for this process, at most for its life, and write its name into it; False if another has it.

    Who ends in order takes its name out again.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    _drop_inherited_holds()
    _held.add(descriptor)
    held = False
    try:
        held = _try_lock(descriptor)
        if held:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        yield held
    finally:
        if descriptor in _held:
            if held:
                os.ftruncate(descriptor, 0)
            _held.remove(descriptor)
            os.close(descriptor)


def look_at_hold(path: Path) -> Holding:
    """Say whether a file is held, without holding it longer than a moment, which others share, or writing to it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return Holding("free")
    try:
        content = os.pread(descriptor, 4096, 0)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return holding_of(content, "held")
        return holding_of(content, "left") if content else Holding("free")
    finally:
        os.close(descriptor)


@cache
def _drop_inherited_holds() -> None:
    """Let every later fork of this process close its copies of the held descriptors."""
    os.register_at_fork(after_in_child=_close_held)


def _close_held() -> None:
    while _held:
        os.close(_held.pop())


def publish_file(path: Path, data: bytes | Path, *, root: Path, durable: bool = True) -> bool:
    """Write a temporary file in the root and link it under its name; False if another writer was first.

    A file of a scratch directory of the root is linked as it is. One that is not `durable` is whole for every process,
    whoever is killed, but may be torn after a power cut that comes before it is synced.
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
    """Create a temporary file, locked as long as its writer lives."""
    while True:
        path = directory / f"{TEMPORARY}{secrets.token_hex(8)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor, path
        os.close(descriptor)  # a sweep came between open and lock


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked_file(path: Path, *, seconds: float) -> Iterator[None]:
    """Wait so long at most for a temporary file's turn, which threads and processes take; it is gone afterwards."""
    deadline = time.monotonic() + seconds
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        while not (locked := _try_lock(descriptor)) and time.monotonic() < deadline:
            time.sleep(_TURN_POLL_SECONDS)
        if not locked or os.fstat(descriptor).st_nlink:
            break
        os.close(descriptor)  # it was another's turn, whose file is gone
    try:
        yield
    finally:
        if locked:
            path.unlink(missing_ok=True)
        os.close(descriptor)


def walk_files(root: Path) -> Iterator[tuple[str, str]]:
    """Walk (directory, file name) pairs, scratch directories left out.

    A directory that cannot be read is an error, one that vanished is not.
    """

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for directory, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [folder for folder in folders if not folder.startswith(TEMPORARY)]
        for name in names:
            yield directory, name


def remove_empty(path: Path, *, root: Path) -> Path:
    """Remove a directory below the root, and those around it, as far as they are empty; return the first that is not.

    Who is about to write there makes it again.
    """
    while path != root:
        try:
            path.rmdir()
        except FileNotFoundError:
            pass
        except OSError:  # POSIX leaves open whether what is not empty is EEXIST or ENOTEMPTY
            return path
        path = path.parent
    return root


def checked_directory(root: Path) -> Path:
    """Return a store's directory. Raises BadInput where none can be: it is a file, or below one."""
    there = _nearest(root)
    if not there.is_dir():
        below = "" if there == root else f" at {there}"
        raise BadInput(f"store {str(root)!r}: expected a directory, found a file{below}")
    return root


def check_writable(root: Path) -> None:
    """Raise BadInput where a store cannot be written that lies, or is to lie, in a directory; nothing is written."""
    there = _nearest(root)
    if not os.access(there, os.W_OK | os.X_OK):
        raise BadInput(f"store {str(root)!r}: expected a directory that can be written, cannot write to {there}")


def _nearest(path: Path) -> Path:
    """Return the path itself, or what is nearest above it and there."""
    return next(each for each in (path, *path.parents) if each.exists() or each == each.parent)


def make_directory(path: Path) -> None:
    """Create a directory and its parents durably."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Have a file, or what a directory names, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
