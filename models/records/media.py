"""Original image files in media shards. Rows of other shards refer to images by digest."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import pyarrow as pa

from infra.config import Settings
from infra.errors import Damaged
from infra.store.shards import ShardRef, open_tables, read_shard
from infra.store.storage import Store
from models.records.pictures import STATES, States, read_states

MEDIA: str = "media"
"""Name of the kind of shards that contain images."""


class ShownImage(Settings):
    """Facts about an image for people: the digest, the file format and the size."""

    digest: str
    """BLAKE3 digest of the image file's bytes."""
    format: str
    """File format as named by Pillow, such as PNG."""
    width: int
    """Width in pixels."""
    height: int
    """Height in pixels."""
    bytes: int
    """Size of the file in bytes."""


class ImageSource(Protocol):
    """Source from which models read the encoded images of prompts, by digest."""

    def encoded(self, digest: str) -> bytes:
        """Return the encoded bytes of an image."""
        ...


@dataclass(frozen=True, slots=True)
class ImagePart:
    """Location of an image inside a file, as a byte range that can be read without Arrow, and its size in pixels."""

    path: Path
    offset: int
    length: int
    width: int
    height: int


@runtime_checkable
class ImageFiles(Protocol):
    """Source of the file locations of images on this machine, for servers that read image files themselves."""

    def part(self, digest: str) -> ImagePart:
        """Return the location of an image."""
        ...


@runtime_checkable
class DrawnPictures(Protocol):
    """Source of the denoising states of generated pictures, by digest, on which text-to-image policies are trained."""

    def states(self, digest: str, *, steps: int) -> States:
        """Return the states before each of the `steps` trained steps and after the last: float32 of shape (steps + 1) x
        D."""
        ...


class Gallery:
    """Images of the work unit that a worker is running, for models that are loaded once and used for many work units.

    The model keeps one object of this class, and the worker replaces its image source for each work unit.
    """

    def __init__(self) -> None:
        self.source: ImageSource | None = None

    def encoded(self, digest: str) -> bytes:
        """Return the encoded bytes of an image. Raises Damaged if the work unit named no media shards."""
        return self._require_source(digest).encoded(digest)

    def states(self, digest: str, *, steps: int) -> States:
        """Return the states of a generated picture. Raises Damaged if there are none."""
        source = self._require_source(digest)
        if not isinstance(source, DrawnPictures):
            raise Damaged(
                f"image {digest} has no stored denoising states, because it is not in a media shard of generated "
                "pictures. Only pictures that the policy generated can be trained on"
            )
        return source.states(digest, steps=steps)

    def _require_source(self, digest: str) -> ImageSource:
        if self.source is None:
            raise Damaged(f"image {digest} cannot be read, because the work unit that needs it lists no media shards")
        return self.source


class InMemoryImages:
    """Image source that keeps encoded images in memory, by digest."""

    def __init__(self, images: Mapping[str, bytes]) -> None:
        self._images = images

    def encoded(self, digest: str) -> bytes:
        """Return the encoded bytes of an image."""
        return self._images[digest]


class Media:
    """Image source that reads media shards.

    The shards are mapped into memory when the first image is requested.
    """

    def __init__(self, store: Store, shards: Sequence[ShardRef]) -> None:
        self._store = store
        self._shards = tuple(shards)

    def encoded(self, digest: str) -> bytes:
        """Return the encoded bytes of an image. Raises Damaged if no shard contains it."""
        table, row = self._locate(digest)
        return bytes(table["bytes"][row].as_buffer())

    def states(self, digest: str, *, steps: int) -> States:
        """Return the states of a generated picture. Raises Damaged if no policy generated it."""
        table, row = self._locate(digest)
        encoded = table[STATES][row].as_buffer() if STATES in table.column_names else None
        if not encoded:
            raise Damaged(
                f"image {digest} has no stored denoising states, because it is an image of a prompt, not a picture "
                "that a policy generated"
            )
        return read_states(memoryview(encoded), steps=steps)

    def shown(self, digest: str) -> ShownImage:
        """Return the description of an image. Raises Damaged if no shard contains it."""
        table, row = self._locate(digest)
        fields = {name: table[name][row].as_py() for name in ("digest", "format", "width", "height")}
        return ShownImage(**fields, bytes=len(table["bytes"][row].as_buffer()))

    def part(self, digest: str) -> ImagePart:
        """Return the location of an image in its shard's file. Raises Damaged if no shard contains it."""
        self._locate(digest)
        return self._parts[digest]

    @property
    def digests(self) -> list[str]:
        """Digests of all images in the media shards."""
        return list(self._places)

    def _locate(self, digest: str) -> tuple[pa.Table, int]:
        try:
            return self._places[digest]
        except KeyError:
            shards = ", ".join(shard.key for shard in self._shards) or "none"
            raise Damaged(
                f"image {digest} is missing from the media shards of the work unit ({shards}). Restore the shards "
                "from a copy of the run"
            ) from None

    @cached_property
    def _places(self) -> dict[str, tuple[pa.Table, int]]:
        tables = [read_shard(self._store, shard) for shard in self._shards]
        return {digest: (table, row) for table in tables for row, digest in enumerate(table["digest"].to_pylist())}

    @cached_property
    def _parts(self) -> dict[str, ImagePart]:
        return {digest: part for path in open_tables(self._store, self._shards) for digest, part in _parts_of(path)}


def _parts_of(path: Path) -> Iterator[tuple[str, ImagePart]]:
    """Yield the digest and location of each image in a shard's file, which is uncompressed and can be read in place."""
    mapped = pa.memory_map(str(path)).read_buffer()
    for batch in pa.ipc.open_file(mapped).read_all().to_batches():
        _, bounds, data = batch["bytes"].buffers()
        begins = np.frombuffer(bounds, np.int64) + data.address - mapped.address
        sizes = (batch[name].to_pylist() for name in ("digest", "width", "height"))
        for begin, end, (digest, width, height) in zip(begins, begins[1:], zip(*sizes, strict=True), strict=False):
            yield digest, ImagePart(path, int(begin), int(end - begin), width, height)
