"""Object store in memory for addresses gs://…, in place of Google's."""

from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry


class Bucket(MemoryFileSystem):
    """File system that contains the objects of all buckets."""

    protocol = ("gs",)
    store: dict = {}
    pseudo_dirs = [""]

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.removeprefix("gs://"))


@contextmanager
def memory_bucket() -> Iterator[Bucket]:
    """Run the block with an empty object store for addresses gs://…"""
    fsspec.register_implementation("gs", Bucket, clobber=True)
    Bucket.store.clear()
    yield Bucket()
    Bucket.store.clear()
    _registry.pop("gs")
