"""The optimizer's state in the store: one safetensors file per rank, and a JSON file that says whose they are.

Every rank writes its own from a copy in host memory while the next rollouts are generated. What the whole is called is
known before: digests are of the bytes that will be written. A state that is lost on the way is learnt again.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file

from infra.config import Settings
from infra.errors import BadInput, Damaged
from infra.store.bundles import (
    BundledFile,
    BundleRef,
    Contents,
    complete_bundle,
    describe_pieces,
    has_bundle,
    put_bundled,
    write_hashed,
)
from infra.store.checksums import canonical_json
from infra.store.storage import Store
from models.config.objectives import UpdateConfig
from models.modeling.safetensors import tensor_pieces
from models.training.ranks import Ranks, any_rank, broadcast_bytes, gather_bytes
from models.training.trainer import Moments, Trainer, zero_stage

_LAYOUT = "state.json"
_FILE = TypeAdapter(BundledFile)

HostCopy = tuple[Moments, BundledFile]
"""A rank's part of a state in host memory, and what its file will be."""


class StateLayout(Settings):
    """How the state was spread; only ranks that are spread alike can continue with it."""

    world_size: int
    """Ranks that shared it."""
    zero_stage: int
    """DeepSpeed's stage."""
    dtype: str
    """Precision of the weights."""


class StateWriter:
    """Writes states beside whatever else the ranks do; every rank holds one and they act together."""

    def __init__(self, store: Store, update: UpdateConfig, *, ranks: Ranks, on_progress: Callable[[], None]) -> None:
        self._store = store
        self._update = update
        self._ranks = ranks
        self._on_progress = on_progress
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state")
        self._under_way: list[tuple[Future[None], BundleRef, Contents]] = []

    def copy(self, trainer: Trainer) -> "Future[HostCopy]":
        """Begin to copy this rank's part and to hash it, beside what only reads the trainer."""
        return self._thread.submit(_copied, trainer.moments())

    def begin(self, copying: "Future[HostCopy]") -> BundleRef:
        """Begin to write what was copied, and say what the state is; the trainer may go on."""
        moments, mine = copying.result()
        contents = self._contents(mine)
        ref = contents.ref("states")
        self._under_way.append((self._thread.submit(self._write, moments, ref, contents), ref, contents))
        return ref

    def settle(self) -> None:
        """Wait until every state that was begun is in the store; what could not be written is raised."""
        under_way, self._under_way = self._under_way, []
        for writing, _, _ in under_way:
            writing.result()
        if any_rank(bool(under_way), self._ranks):  # the others' parts are there
            for _, ref, contents in under_way if self._ranks.rank == 0 else ():
                complete_bundle(self._store, ref, contents)

    def close(self) -> None:
        """End with what is under way."""
        self._thread.shutdown()

    def _write(self, moments: Moments, ref: BundleRef, contents: Contents) -> None:
        if has_bundle(self._store, ref):
            return
        with self._store.scratch() as scratch:
            name = _file_name(self._ranks.rank)
            write_hashed(scratch / name, self._counted(moments))
            put_bundled(self._store, ref, contents, name, scratch / name)
        if self._ranks.rank == 0:
            put_bundled(self._store, ref, contents, _LAYOUT, _layout(self._update, self._ranks))
        complete_bundle(self._store, ref, contents)  # by whoever is last

    def _counted(self, moments: Moments) -> Iterator[bytes | memoryview]:
        for piece in tensor_pieces(moments):
            yield piece
            self._on_progress()

    def _contents(self, mine: BundledFile) -> Contents:
        """What all ranks' files are."""
        found = gather_bytes(_FILE.dump_json(mine), self._ranks)
        files = {_file_name(rank): _FILE.validate_json(data) for rank, data in enumerate(found)}
        layout = describe_pieces([_layout(self._update, self._ranks)])
        encoded = Contents(files={**files, _LAYOUT: layout}).encode() if self._ranks.rank == 0 else b""
        return Contents.model_validate_json(broadcast_bytes(encoded, self._ranks))


def state_files(ranks: Ranks) -> list[str]:
    """Name what a rank continues with: its own part of a state, and what tells how it was spread."""
    return [_LAYOUT, _file_name(ranks.rank)]


def load_state(trainer: Trainer, directory: Path, *, update: UpdateConfig, ranks: Ranks) -> None:
    """Continue with this rank's state from a verified directory; no pickle is ever read."""
    expected = json.loads(_layout(update, ranks))
    found = json.loads((directory / _LAYOUT).read_text())
    if found != expected:
        raise BadInput(f"optimizer state {directory.name}: expected {expected}, found {found}")
    try:
        moments = load_file(directory / _file_name(ranks.rank))
    except SafetensorError as error:
        raise Damaged(f"optimizer state {directory.name}, rank {ranks.rank}: {error}") from error
    trainer.load_moments(moments)


def _copied(moments: Moments) -> HostCopy:
    copied = {name: value.detach().to("cpu", copy=True) for name, value in moments.items()}
    return copied, describe_pieces(tensor_pieces(copied))


def _layout(update: UpdateConfig, ranks: Ranks) -> bytes:
    layout = StateLayout(world_size=ranks.world_size, zero_stage=zero_stage(update), dtype=update.dtype)
    return canonical_json(layout.model_dump())


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"
