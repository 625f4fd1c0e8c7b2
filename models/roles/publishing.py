"""A trained policy becomes a version: weights that anyone can load, and the state to continue from."""

import shutil
import tempfile
from pathlib import Path

from pydantic import TypeAdapter

from infra.store.bundles import fetch_bundle, publish_bundle
from infra.store.storage import Store
from models.objectives.config import UpdateConfig
from models.records import PolicyVersion
from models.roles.optimizer_state import save_state
from models.roles.ranks import Ranks, broadcast_bytes
from models.roles.trainer import Trainer

_WEIGHTS = (".safetensors", ".safetensors.index.json")
_VERSION = TypeAdapter(PolicyVersion)


def publish_policy(
    store: Store, trainer: Trainer, *, version: int, parent: PolicyVersion, state_of: UpdateConfig | None, ranks: Ranks
) -> PolicyVersion:
    """Publish from rank 0 and tell all ranks; without `state_of` the next update starts a fresh optimizer.

    Where adapters are trained, the new version has its parent's weights and an adapter of its own.
    """
    with tempfile.TemporaryDirectory(prefix="rheostat-policy-") as temporary:
        trained, state = Path(temporary, "trained"), Path(temporary, "state")
        trained.mkdir()
        state.mkdir()
        trainer.save_weights(trained)
        if state_of is not None:
            save_state(trainer, state, update=state_of, ranks=ranks)
        encoded = b""
        if ranks.rank == 0:
            adapter = None
            if trainer.trains_adapters:
                weights, adapter = parent.weights, publish_bundle(store, trained, prefix="adapters")
            else:
                _copy_beside_weights(fetch_bundle(store, parent.weights), trained)
                weights = publish_bundle(store, trained, prefix=parent.weights.key.rpartition("/")[0])
            published = PolicyVersion(
                version=version,
                weights=weights,
                state=None if state_of is None else publish_bundle(store, state, prefix="states"),
                adapter=adapter,
            )
            encoded = _VERSION.dump_json(published)
        return _VERSION.validate_json(broadcast_bytes(encoded, ranks))


def _copy_beside_weights(parent: Path, directory: Path) -> None:
    """Copy the tokenizer and whatever else the parent has beside weights and what was written anew."""
    for source in sorted(path for path in parent.iterdir() if path.is_file()):
        target = directory / source.name
        if source.name != "bundle.json" and not source.name.endswith(_WEIGHTS) and not target.exists():
            shutil.copyfile(source, target)
