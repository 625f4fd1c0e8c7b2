"""Optimizer state in the store: one safetensors file per rank, and a JSON file with its layout.

Every rank copies its part to host memory and writes the copy while the next rollouts are generated. The digest of the
state is known before the files are written, because each chunk of the copy is hashed while the next one is copied. The
copy of a state on a GPU is in pinned memory, which the copies of later states use again. If a state is lost before it
is stored, the update is repeated.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from safetensors import SafetensorError
from safetensors.torch import load_file

from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput, Damaged
from rheostat.infra.store.bundles import (
    BundledFile,
    BundleRef,
    Contents,
    complete_bundle,
    fetch_bundle_files,
    has_bundle,
    put_bundle_file,
)
from rheostat.infra.store.checksums import canonical_json
from rheostat.infra.store.contracts import Store
from rheostat.infra.store.file_writer import Piece, describe_pieces, write_pieces
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.modeling.safetensors import copy_to_host, tensor_pieces
from rheostat.models.training.layouts import StateLayout, convert_state
from rheostat.models.training.ranks import Ranks, any_rank, gather_contents
from rheostat.models.training.trainer import Moments, Trainer

_LAYOUT = "state.json"

HostCopy = tuple[Sequence[Piece], BundledFile]
"""Copy of one rank's optimizer state in host memory: the content of the file to be written, with its size and
digest."""


class StateWriter:
    """Background writer that stores optimizer states while training continues.

    Every rank has a writer, and all ranks call its methods together.
    """

    def __init__(self, store: Store, update: UpdateConfig, *, ranks: Ranks, on_progress: Callable[[], None]) -> None:
        self._store = store
        self._update = update
        self._ranks = ranks
        self._on_progress = on_progress
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state")
        self._under_way: list[tuple[Future[None], BundleRef, Contents]] = []

    def copy(self, trainer: Trainer) -> "Future[HostCopy]":
        """Start copying this rank's optimizer state to host memory and hashing it. Until the copy is finished, the
        trainer may only be read."""
        return self._thread.submit(_copied, trainer.moments())

    def begin(self, copying: "Future[HostCopy]") -> BundleRef:
        """Wait for a copy that `copy` started, start writing it, and return the reference of the optimizer state in the
        store. Training may then continue. Collective: every rank must call this."""
        pieces, own_file = copying.result()
        files = {_file_name(self._ranks.rank): own_file}
        if self._ranks.rank == 0:
            files[_LAYOUT] = describe_pieces([_encoded(_build_layout(self._update, self._ranks))])
        contents = gather_contents(Contents(files=files), self._ranks)
        ref = contents.ref("states")
        self._under_way.append((self._thread.submit(self._write, pieces, ref, contents), ref, contents))
        return ref

    def wait(self) -> None:
        """Wait until every state passed to `begin` is stored. Raises the error of a failed write.

        Collective: every rank must call this.
        """
        under_way, self._under_way = self._under_way, []
        for writing, _, _ in under_way:
            writing.result()
        if any_rank(bool(under_way), self._ranks):  # the parts of the other ranks are stored
            for _, ref, contents in under_way if self._ranks.rank == 0 else ():
                complete_bundle(self._store, ref, contents)

    def close(self) -> None:
        """Finish the writes in progress and end the background thread."""
        self._thread.shutdown()

    def _write(self, pieces: Sequence[Piece], ref: BundleRef, contents: Contents) -> None:
        if has_bundle(self._store, ref):
            return
        with self._store.scratch() as scratch:
            name = _file_name(self._ranks.rank)
            write_pieces(scratch / name, self._counted(pieces))
            put_bundle_file(self._store, ref, contents, name, scratch / name)
        if self._ranks.rank == 0:
            put_bundle_file(self._store, ref, contents, _LAYOUT, _encoded(_build_layout(self._update, self._ranks)))
        complete_bundle(self._store, ref, contents)  # done by the last rank

    def _counted(self, pieces: Sequence[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            yield piece
            self._on_progress()


def load_state(trainer: Trainer, store: Store, ref: BundleRef, *, update: UpdateConfig, ranks: Ranks) -> None:
    """Load this rank's part of a stored optimizer state into the trainer. Raises BadInput if the state's precision,
    optimizer or layout does not fit, and Damaged if a file cannot be parsed. Digests are verified, and no pickle is
    ever read.

    If the number of ranks or the ZeRO stage has changed, each rank collects its values from the files of the ranks that
    wrote the state. If either ZeRO stage is above 0, only AdamW supports such a change.
    """
    current = _build_layout(update, ranks)
    stored = StateLayout.model_validate_json((fetch_bundle_files(store, ref, [_LAYOUT]) / _LAYOUT).read_bytes())
    if stored.dtype != current.dtype:
        raise BadInput(
            f"the optimizer state {ref.key} was written for {stored.dtype} weights, but update.dtype is "
            f"{current.dtype}. Set update.dtype to {stored.dtype!r}"
        )
    if stored.optimizer != current.optimizer:
        raise BadInput(
            f"the optimizer state {ref.key} was written by the optimizer {stored.optimizer}, but update.optimizer is "
            f"{current.optimizer}. Set update.optimizer.kind to {stored.optimizer!r}"
        )
    is_whole = stored.zero_stage == current.zero_stage == 0  # every rank has all of the state
    if stored != current and not is_whole and current.optimizer != "adamw":
        raise BadInput(
            f"the optimizer state {ref.key} was written by {format_count(stored.world_size, 'rank')} at ZeRO stage "
            f"{stored.zero_stage}, but the update has {format_count(current.world_size, 'rank')} at stage "
            f"{current.zero_stage}. The optimizer {current.optimizer} can only continue with the same number of ranks "
            "and the same stage. Set pools.update_ranks and update.zero_stage back"
        )
    if is_whole and stored != current:
        stored, ranks = current, replace(ranks, rank=0)
    writers = [ranks.rank] if stored == current else range(stored.world_size)
    names = [_file_name(rank) for rank in writers]
    directory = fetch_bundle_files(store, ref, names)
    try:
        if stored == current:
            moments = load_file(directory / names[0])
        else:
            files = [directory / name for name in names]
            moments = convert_state(files, stored, current, rank=ranks.rank, sizes=trainer.sizes, shapes=trainer.shapes)
    except SafetensorError as error:
        raise Damaged(
            f"the optimizer state {ref.key} of rank {ranks.rank} cannot be read: {error}. Restore the file from a "
            "copy of the run"
        ) from error
    trainer.load_moments(moments)


def _copied(moments: Moments) -> HostCopy:
    pieces: list[Piece] = []

    def copies() -> Iterator[Piece]:
        for piece in tensor_pieces(moments, to_host=copy_to_host):
            pieces.append(piece)
            yield piece

    return pieces, describe_pieces(copies())


def _build_layout(update: UpdateConfig, ranks: Ranks) -> StateLayout:
    return StateLayout(
        world_size=ranks.world_size,
        zero_stage=update.running_stage,
        dtype=update.dtype,
        optimizer=update.optimizer.label,
    )


def _encoded(layout: StateLayout) -> bytes:
    return canonical_json(layout.model_dump(exclude_defaults=True))


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"
