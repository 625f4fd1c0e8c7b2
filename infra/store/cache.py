"""Files of this machine that stand for objects elsewhere: fetched once, dropped beyond a limit, oldest use first."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from infra.config import whole_number
from infra.store.disk import TEMPORARY, locked_file, make_directory, walk_files

KEPT_SECONDS = 600
"""What was used so recently may be open by name, and stays whatever the limit."""

TURN_SECONDS = 120.0
"""So long one waits for another who fetches the same, and may have been stopped; then both do."""

LOOKS = 16
"""In how many parts a process takes what was free when it last looked: it looks again after each."""

_allowed: dict[Path, int] = {}
"""Bytes that this process may enter into a cache before it looks at all of its files again."""


@dataclass(frozen=True, slots=True)
class Cache:
    """A directory with files by (store, key), shared by processes.

    A file stands for the object of its size and tag, which its time of change tells; what libraries load from it is
    verified by the digests of shards and bundles, as on any other disk.
    """

    root: Path
    limit_bytes: int

    def holds(self, path: Path, size: int, tag: str) -> bool:
        """Whether a file is the object of this size and tag; it counts as used now."""
        try:
            status = path.stat()
        except FileNotFoundError:
            return False
        return status.st_size == size and status.st_mtime_ns // 1000 == _microseconds(tag) and self.touch(path)

    def touch(self, path: Path) -> bool:
        """Count a file as used now; False if there is none."""
        try:
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        except FileNotFoundError:
            return False
        return True

    def enter(self, fetched: Path, path: Path, tag: str) -> None:
        """Have a file stand for the object of this tag, and make room."""
        size = fetched.stat().st_size
        os.utime(fetched, ns=(time.time_ns(), _microseconds(tag) * 1000))
        path.parent.mkdir(parents=True, exist_ok=True)
        fetched.replace(path)
        _allowed[self.root] = _allowed.get(self.root, 0) - size
        if _allowed[self.root] < 0:
            self.make_room()

    @contextmanager
    def turn(self, path: Path) -> Iterator[None]:
        """Have nobody else of this machine fetch a file meanwhile, unless one takes too long for it."""
        make_directory(self.root)
        name = f"{TEMPORARY}{blake3(os.fsencode(path)).hexdigest()[:16]}"
        with locked_file(self.root / name, seconds=TURN_SECONDS):
            yield

    def make_room(self, wanted: int = 0) -> bool:
        """Drop what was used longest ago until so much fits; False if what is in use leaves too little room."""
        found = []
        for directory, name in walk_files(self.root):
            with suppress(FileNotFoundError):  # another process makes room too
                path = Path(directory, name)
                found.append((path.stat(), path))
        size, before = sum(status.st_size for status, _ in found), time.time() - KEPT_SECONDS
        is_full = size + wanted > self.limit_bytes
        enough = self.limit_bytes - self.limit_bytes // LOOKS  # so that the next files need no room made
        for status, path in sorted(found, key=lambda each: each[0].st_atime) if is_full else ():
            if size + wanted <= enough or status.st_atime > before:
                break
            path.unlink(missing_ok=True)
            size -= status.st_size
        _allowed[self.root] = max(0, self.limit_bytes - size) // LOOKS
        return size + wanted <= self.limit_bytes


def _microseconds(tag: str) -> int:
    """What tells a tag, as a time before 2006; servers quote it in some answers only."""
    return int.from_bytes(blake3(tag.strip('"').encode()).digest(length=8)) >> 14


def open_cache() -> Cache:
    """Find the cache that the environment names; RHEOSTAT_CACHE is its directory, RHEOSTAT_CACHE_GB its limit.

    The directory is its own: whatever lies there may be removed to make room.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(os.environ.get("RHEOSTAT_CACHE") or home / "rheostat" / "objects")
    return Cache(root, int(whole_number("RHEOSTAT_CACHE_GB", 100)) * 10**9)
