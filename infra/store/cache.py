"""Cache on this machine for objects of remote stores. If the cache exceeds its limit, the least recently used files are
deleted."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from rheostat.infra.config import read_number_variable
from rheostat.infra.store.disk import TEMPORARY, locked_file, make_directory, walk_files

MIN_KEPT_SECONDS = 600
"""Minimum time in seconds for which a cached file is kept after its last use, because it may still be open."""

LOCK_SECONDS = 120.0
"""Maximum time in seconds to wait while another process downloads the same file. After this time, this process
downloads it too."""

MEASUREMENT_DIVISOR = 16
"""Divisor that decides how often the size of the cache is measured. A process measures it again after adding files of
1/16 of the free space."""

_allowed: dict[Path, int] = {}
"""Number of bytes that this process may add to a cache before it must measure the size of the cache again, by directory
of the cache."""


@dataclass(frozen=True, slots=True)
class Cache:
    """Directory of this machine's local copies of objects in remote stores, shared by all processes of the machine.

    The modification time of a file encodes the ETag of its object. Therefore it is known whether the file is a copy of
    the object's present version. The content is verified with the digests of shards and bundles, as on any other disk.
    """

    root: Path
    limit_bytes: int

    def is_current(self, path: Path, size: int, tag: str) -> bool:
        """Return whether a cached file is a copy of the object with this size and ETag. If so, the time of its last use
        is updated."""
        try:
            status = path.stat()
        except FileNotFoundError:
            return False
        return status.st_size == size and status.st_mtime_ns // 1000 == _microseconds(tag) and self.touch(path)

    def touch(self, path: Path) -> bool:
        """Update the time of the last use of a cached file. Return False if the file does not exist."""
        try:
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        except FileNotFoundError:
            return False
        return True

    def add(self, downloaded: Path, path: Path, tag: str) -> None:
        """Move a downloaded file to its `path` in the cache, and record the ETag (`tag`) of its object. If the cache is
        full, old files are deleted."""
        size = downloaded.stat().st_size
        os.utime(downloaded, ns=(time.time_ns(), _microseconds(tag) * 1000))
        path.parent.mkdir(parents=True, exist_ok=True)
        downloaded.replace(path)
        _allowed[self.root] = _allowed.get(self.root, 0) - size
        if _allowed[self.root] < 0:
            self.make_room()

    @contextmanager
    def lock_download(self, path: Path) -> Iterator[None]:
        """Run the block, which downloads a file, with a lock on this file. If another process of this machine has the
        lock, wait for at most `LOCK_SECONDS`."""
        make_directory(self.root)
        name = f"{TEMPORARY}{blake3(os.fsencode(path)).hexdigest()[:16]}"
        with locked_file(self.root / name, seconds=LOCK_SECONDS):
            yield

    def make_room(self, wanted: int = 0) -> bool:
        """Delete the least recently used files until the cache has room for `wanted` more bytes. Return False if it
        cannot have that much room, because other files are in use."""
        files = []
        for directory, name in walk_files(self.root):
            with suppress(FileNotFoundError):  # another process is making room too
                path = Path(directory, name)
                files.append((path.stat(), path))
        size, before = sum(status.st_size for status, _ in files), time.time() - MIN_KEPT_SECONDS
        is_full = size + wanted > self.limit_bytes
        enough = self.limit_bytes - self.limit_bytes // MEASUREMENT_DIVISOR  # the next files then fit without deletions
        for status, path in sorted(files, key=lambda each: each[0].st_atime) if is_full else ():
            if size + wanted <= enough or status.st_atime > before:
                break
            path.unlink(missing_ok=True)
            size -= status.st_size
        _allowed[self.root] = max(0, self.limit_bytes - size) // MEASUREMENT_DIVISOR
        return size + wanted <= self.limit_bytes


def _microseconds(tag: str) -> int:
    """Convert an ETag to a modification time before the year 2006, in microseconds. The time of a cached file thus
    records its ETag. Quotes around the ETag are ignored, because not all servers send them."""
    return int.from_bytes(blake3(tag.strip('"').encode()).digest(length=8)) >> 14


def open_cache() -> Cache:
    """Open this machine's cache of remote objects. The environment variables RHEOSTAT_CACHE and RHEOSTAT_CACHE_GB set
    its directory and size limit.

    The directory must not be used for anything else, because all files in it may be deleted to make room.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(os.environ.get("RHEOSTAT_CACHE") or home / "rheostat" / "objects")
    return Cache(root, int(read_number_variable("RHEOSTAT_CACHE_GB", 100)) * 10**9)
