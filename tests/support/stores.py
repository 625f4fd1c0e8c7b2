"""Small shards and bundles of files in a store, and damage to them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from rheostat.infra.store.bundles import BundleRef, publish_bundle
from rheostat.infra.store.contracts import Entry
from rheostat.infra.store.local import LocalStore
from rheostat.infra.store.runs import Run
from rheostat.infra.store.shards import ShardRef, write_shard


@dataclass(frozen=True)
class RacedStore(LocalStore):
    """Store on disk in which another process acts at given moments.

    These are each listing, and the time between locating an object and opening its file.
    """

    act: Callable[[str], object]
    """Receives the prefix of the listing, or the key of the object."""

    def local_path(self, key: str) -> Path:
        path = super().local_path(key)
        self.act(key)
        return path

    def entries(self, prefix: str) -> list[Entry]:
        self.act(prefix)
        return super().entries(prefix)


def write_files(directory: Path, files: Mapping[str, bytes]) -> Path:
    """Write files with their folders below a directory; return the directory."""
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return directory


def read_files(directory: Path) -> dict[str, bytes]:
    """Return the content of every file below a directory."""
    paths = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


def write_number_shard(run: Run, number: int) -> ShardRef:
    """Write a shard with 100 rows of one number."""
    return write_shard(run.store, pa.table({"x": [number] * 100}), kind="test", metadata={})


def publish_number_policy(run: Run, directory: Path, number: int) -> BundleRef:
    """Publish a policy of two files whose content depends on a number."""
    files = {"config.json": b"{}", "model.safetensors": bytes([number]) * 1000}
    return publish_bundle(run.store, write_files(directory, files), prefix="policies")


def flip_bit(path: Path, position: int = -9) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
