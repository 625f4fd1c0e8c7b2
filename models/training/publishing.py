"""Publishing of new policy versions: trained weights or adapters, with the other files of the parent version."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

from pydantic import TypeAdapter

from infra.store.bundles import (
    BundledFile,
    BundleRef,
    describe_bundle,
    describe_stored_files,
    fetch_bundle,
    publish_bundle,
)
from infra.store.contracts import Store
from models.denoising.pipeline import is_pipeline, link_frozen_parts
from models.records.versions import ModelVersion
from models.text.template_files import copy_named_templates
from models.training.ranks import Ranks, broadcast_bytes
from models.training.trainer import Trainer

_WEIGHTS: Final = (".safetensors", ".safetensors.index.json")
_VERSION: Final = TypeAdapter(ModelVersion)


def publish_version(
    store: Store,
    trainer: Trainer,
    *,
    version: int,
    parent: ModelVersion,
    ranks: Ranks,
    put: Literal["durable", "early", "not"],
    on_progress: Callable[[], None],
) -> ModelVersion:
    """Publish the trained model from rank 0 and return the new version, without an optimizer state, on all ranks. With
    `put` = "not", nothing is stored and only the description of the new version is returned. With "early", the files
    may be used at once but must be synced to disk before a manifest names them. `on_progress` is called while rank 0
    writes the files. Collective: every rank must call this.

    If adapters are trained, the new version combines its parent's weights with a new adapter.
    """
    with store.scratch() as scratch:
        files = trainer.save_weights(scratch, on_progress=on_progress)
        encoded = b""
        if ranks.rank == 0:
            prefix = "adapters" if trainer.trains_adapters else parent.weights.key.rpartition("/")[0]
            if not trainer.trains_adapters:
                files = {**files, **_add_files_beside_weights(store, parent.weights, scratch)}
            if put == "not":
                bundle = describe_bundle(scratch, written_files=files).ref(prefix)
            else:
                bundle = publish_bundle(store, scratch, prefix=prefix, written_files=files, durable=put == "durable")
            part = {"adapter" if trainer.trains_adapters else "weights": bundle}
            encoded = _VERSION.dump_json(replace(parent, version=version, state=None, **part))
        return _VERSION.validate_json(broadcast_bytes(encoded, ranks))


def _add_files_beside_weights(store: Store, weights: BundleRef, directory: Path) -> dict[str, BundledFile]:
    """Add the tokenizer and other files of the version with these weights, except weights and files that already exist
    in `directory`. Return the digest and size of each file that need not be read again."""
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
