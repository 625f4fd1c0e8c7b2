"""Files of this machine that stand for objects elsewhere: fetched once, dropped beyond a limit, oldest use first."""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from infra.config import whole_number
from infra.store.disk import walk_files

KEPT_SECONDS = 600
"""What was used so recently may be open by name, and stays whatever the limit."""


@dataclass(frozen=True, slots=True)
class Cache:
    """A directory with files by (store, key), shared by processes.

    A file stands for the object of its size and time of change; what libraries load from it is verified by the digests
    of shards and bundles, as on any other disk.
    """

    root: Path
    limit_bytes: int

    def holds(self, path: Path, size: int, modified: datetime) -> bool:
        """Whether a file is the object of this size and time; it counts as used now."""
        try:
            status = path.stat()
            if status.st_size != size or status.st_mtime_ns != _nanoseconds(modified):
                return False
            os.utime(path, ns=(time.time_ns(), status.st_mtime_ns))
        except FileNotFoundError:
            return False
        return True

    def enter(self, fetched: Path, path: Path, modified: datetime) -> None:
        """Have a fetched file stand for an object that changed last at that time, and make room."""
        os.utime(fetched, ns=(time.time_ns(), _nanoseconds(modified)))
        path.parent.mkdir(parents=True, exist_ok=True)
        fetched.replace(path)
        self._make_room()

    def _make_room(self) -> None:
        found = []
        for directory, name in walk_files(self.root):
            with suppress(FileNotFoundError):  # another process makes room too
                path = Path(directory, name)
                found.append((path.stat(), path))
        size, before = sum(status.st_size for status, _ in found), time.time() - KEPT_SECONDS
        for status, path in sorted(found, key=lambda each: each[0].st_atime):
            if size <= self.limit_bytes or status.st_atime > before:
                return
            path.unlink(missing_ok=True)
            size -= status.st_size


def _nanoseconds(moment: datetime) -> int:
    return int(moment.timestamp()) * 1_000_000_000


def open_cache() -> Cache:
    """Find the cache that the environment names; RHEOSTAT_CACHE is its directory, RHEOSTAT_CACHE_GB its limit.

    The directory is its own: whatever lies there may be removed to make room.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(os.environ.get("RHEOSTAT_CACHE") or home / "rheostat" / "objects")
    return Cache(root, int(whole_number("RHEOSTAT_CACHE_GB", 100)) * 10**9)
