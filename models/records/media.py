"""Images as they came, in media shards; rows of other shards hold their digests."""

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
from models.records.pictures import STATES, States, states_of

MEDIA: str = "media"
"""Kind of the shards."""


class ShownImage(Settings):
    """An image as people are told of it."""

    digest: str
    """BLAKE3 of its bytes."""
    format: str
    """As Pillow calls it."""
    width: int
    """Pixels."""
    height: int
    """Pixels."""
    bytes: int
    """Size of the file."""


class ImageSource(Protocol):
    """Where images are, by digest."""

    def encoded(self, digest: str) -> bytes:
        """Return the bytes of an image."""
        ...


@dataclass(frozen=True, slots=True)
class ImagePart:
    """Bytes of a file that are an image, for who reads it without Arrow; and how large it is shown."""

    path: Path
    offset: int
    length: int
    width: int
    height: int


@runtime_checkable
class ImageFiles(Protocol):
    """Where images lie in files of this machine, by digest."""

    def part(self, digest: str) -> ImagePart:
        """Return where an image lies."""
        ...


@runtime_checkable
class DrawnPictures(Protocol):
    """Where the states of pictures that were drawn are, by digest."""

    def states(self, digest: str, *, steps: int) -> States:
        """Return what each of so many learnt steps began at, and what the last led to: (steps + 1) x D."""
        ...


class Gallery:
    """Images of whatever work is under way, for models that stay loaded from one piece of work to the next."""

    def __init__(self) -> None:
        self.source: ImageSource | None = None

    def encoded(self, digest: str) -> bytes:
        """Return the bytes of an image. Raises Damaged where no work has said where images are."""
        return self._said(digest).encoded(digest)

    def states(self, digest: str, *, steps: int) -> States:
        """Return the states of a picture that was drawn. Raises Damaged where there are none."""
        source = self._said(digest)
        if not isinstance(source, DrawnPictures):
            raise Damaged(f"image {digest}: expected a media shard with the states that led to it, found none")
        return source.states(digest, steps=steps)

    def _said(self, digest: str) -> ImageSource:
        if self.source is None:
            raise Damaged(f"image {digest}: expected the work to name media shards, found none")
        return self.source


class HeldImages:
    """Images in memory, by digest."""

    def __init__(self, images: Mapping[str, bytes]) -> None:
        self._images = images

    def encoded(self, digest: str) -> bytes:
        """Return the bytes of an image."""
        return self._images[digest]


class Media:
    """The images of some shards; shards are mapped into memory when one of their images is first asked for."""

    def __init__(self, store: Store, shards: Sequence[ShardRef]) -> None:
        self._store = store
        self._shards = tuple(shards)

    def encoded(self, digest: str) -> bytes:
        """Return the bytes of an image. Raises Damaged where no shard has it."""
        table, row = self._place(digest)
        return bytes(table["bytes"][row].as_buffer())

    def states(self, digest: str, *, steps: int) -> States:
        """Return the states of a picture. Raises Damaged where it was not drawn by a policy."""
        table, row = self._place(digest)
        encoded = table[STATES][row].as_buffer() if STATES in table.column_names else None
        if not encoded:
            raise Damaged(f"image {digest}: expected the states that led to it, found none")
        return states_of(memoryview(encoded), steps=steps)

    def shown(self, digest: str) -> ShownImage:
        """Describe an image. Raises Damaged where no shard has it."""
        table, row = self._place(digest)
        said = {name: table[name][row].as_py() for name in ("digest", "format", "width", "height")}
        return ShownImage(**said, bytes=len(table["bytes"][row].as_buffer()))

    def part(self, digest: str) -> ImagePart:
        """Return where an image lies in its shard's file. Raises Damaged where no shard has it."""
        self._place(digest)
        return self._parts[digest]

    @property
    def digests(self) -> list[str]:
        """Names of all images."""
        return list(self._places)

    def _place(self, digest: str) -> tuple[pa.Table, int]:
        try:
            return self._places[digest]
        except KeyError:
            shards = ", ".join(shard.key for shard in self._shards) or "none"
            raise Damaged(f"image {digest}: expected it in a media shard, found none that has it ({shards})") from None

    @cached_property
    def _places(self) -> dict[str, tuple[pa.Table, int]]:
        tables = [read_shard(self._store, shard) for shard in self._shards]
        return {digest: (table, row) for table in tables for row, digest in enumerate(table["digest"].to_pylist())}

    @cached_property
    def _parts(self) -> dict[str, ImagePart]:
        return {digest: part for path in open_tables(self._store, self._shards) for digest, part in _parts_of(path)}


def _parts_of(path: Path) -> Iterator[tuple[str, ImagePart]]:
    """Find the images in a shard's file: it is not compressed, so its columns lie there as they are mapped."""
    mapped = pa.memory_map(str(path)).read_buffer()
    for batch in pa.ipc.open_file(mapped).read_all().to_batches():
        _, bounds, data = batch["bytes"].buffers()
        begins = np.frombuffer(bounds, np.int64) + data.address - mapped.address
        sizes = (batch[name].to_pylist() for name in ("digest", "width", "height"))
        for begin, end, (digest, width, height) in zip(begins, begins[1:], zip(*sizes, strict=True), strict=False):
            yield digest, ImagePart(path, int(begin), int(end - begin), width, height)
