"""Publishing of new policy versions: trained weights or adapters, with the other files of the parent version."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, Literal, Protocol

from rheostat.infra.store.bundles import (
    BundledFile,
    BundleRef,
    Contents,
    complete_put_bundle,
    describe_bundle,
    describe_stored_files,
    fetch_bundle,
    has_bundle,
    put_bundle_file,
    sync_bundle,
    sync_bundle_files,
)
from rheostat.infra.store.contracts import Store
from rheostat.infra.store.staging import find_readable_store, upload_staged_files
from rheostat.models.denoising.pipeline import is_pipeline, link_frozen_parts
from rheostat.models.records.versions import ModelVersion
from rheostat.models.text.template_files import copy_named_templates
from rheostat.models.training.ranks import Ranks, any_rank, broadcast_bytes, gather_contents, wait_for_ranks

Put = Literal["durable", "early", "staged", "not"]
"""Way of storing the files of a new version.

- "durable": synced to disk or uploaded, so that a manifest may name them.
- "early": like "durable", but not synced to disk. They may be used at once.
- "staged": like "early", but only on this machine if the store is remote.
- "not": not at all. Only the description of the version is computed.

Before a manifest names files that are "early" or "staged", `make_version_durable` must be called.
"""

_WEIGHTS: Final = (".safetensors", ".safetensors.index.json")


class SavesWeights(Protocol):
    """Model under training whose weights can be published. Implemented by `Trainer`."""

    @property
    def trains_adapters(self) -> bool:
        """Whether only adapters are trained and the base weights stay fixed."""
        ...

    def save_weights(
        self, directory: Path, *, writers: int = 1, on_progress: Callable[[], None] = lambda: None
    ) -> dict[str, BundledFile]:
        """Write this rank's share of the weight files, or the adapters on rank 0, and return the written files by name.
        The files are divided among the first `writers` ranks."""
        ...


def publish_version(
    store: Store,
    trainer: SavesWeights,
    *,
    version: int,
    parent: ModelVersion,
    ranks: Ranks,
    put: Put,
    on_progress: Callable[[], None],
) -> ModelVersion:
    """Publish the trained model and return the new version, without an optimizer state, on all ranks. Each rank writes
    and stores its share of the weight files, and rank 0 completes the bundle (stored folder). `on_progress` is called
    while files are written. Collective: every rank must call this.

    If adapters are trained, the new version combines its parent's weights with a new adapter.
    """
    prefix = "adapters" if trainer.trains_adapters else parent.weights.key.rpartition("/")[0]
    target = store.staging() if put == "staged" else store
    with target.scratch() as scratch:
        writers = _count_writers(target, scratch, ranks)
        own = Contents(files=trainer.save_weights(scratch, writers=writers, on_progress=on_progress))
        if ranks.rank == 0:
            added = {} if trainer.trains_adapters else _add_files_beside_weights(store, parent.weights, scratch)
            own = describe_bundle(scratch, written_files={**own.files, **added})
        contents = gather_contents(own, ranks)
        bundle = contents.ref(prefix)
        if put != "not":
            place = partial(put_bundle_file, target, bundle, contents, durable=put == "durable")
            for name in own.files:
                place(name, scratch / name, on_progress=on_progress)
            wait_for_ranks(ranks)  # the files of all ranks are stored
            if ranks.rank == 0:
                complete_put_bundle(target, bundle, contents, durable=put == "durable")
    part = {"adapter" if trainer.trains_adapters else "weights": bundle}
    return replace(parent, version=version, state=None, **part)


def make_version_durable(store: Store, bundle: BundleRef, *, ranks: Ranks, on_progress: Callable[[], None]) -> None:
    """Make the files of a new version durable, after which a manifest may name them. Files that are only staged on this
    machine are uploaded. Raises Damaged if a file has changed. Collective: every rank must call this."""
    if not store.traits.downloads:
        # Only the machine that wrote a file to a shared disk is certain to have its content in memory.
        sync_bundle_files(store, bundle) if ranks.rank else sync_bundle(store, bundle)
    elif any_rank(ranks.rank == 0 and not has_bundle(store, bundle), ranks):
        if ranks.rank == 0:
            fetch_bundle(store.staging(), bundle)
        wait_for_ranks(ranks)  # rank 0 has verified the files
        contents = upload_staged_files(
            store, bundle, share=ranks.rank, shares=ranks.world_size, on_progress=on_progress
        )
        wait_for_ranks(ranks)  # the files of all ranks are uploaded
        if ranks.rank == 0:
            complete_put_bundle(store, bundle, contents)
    on_progress()


def _count_writers(store: Store, scratch: Path, ranks: Ranks) -> int:
    """Return the number of ranks that write files. If a rank cannot read the scratch directory of rank 0, because their
    machines do not share the directory of the store, only rank 0 writes. Collective: every rank must call this."""
    if store.traits.downloads:
        return ranks.world_size
    shared = Path(broadcast_bytes(str(scratch).encode(), ranks).decode())
    return 1 if any_rank(not shared.is_dir(), ranks) else ranks.world_size


def _add_files_beside_weights(store: Store, weights: BundleRef, directory: Path) -> dict[str, BundledFile]:
    """Add the tokenizer and other files of the version with these weights, except weights and files that already exist
    in `directory`. Return the digest and size of each file that need not be read again."""
    store = find_readable_store(store, weights)
    parent = fetch_bundle(store, weights)
    if is_pipeline(parent):
        linked, files = link_frozen_parts(parent, directory), describe_stored_files(store, weights)
        return {name: files[name] for name in linked}
    for source in sorted(path for path in parent.iterdir() if path.is_file()):
        target = directory / source.name
        if source.name != "bundle.json" and not source.name.endswith(_WEIGHTS) and not target.exists():
            shutil.copyfile(source, target)
    copy_named_templates(parent, directory)
    return {}
