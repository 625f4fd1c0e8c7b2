"""Exponential moving average of the policies of a run, which is the reference of a KL penalty with `ema_decay`."""

from collections.abc import Callable, Mapping
from pathlib import Path

from rheostat.infra.errors import BadInput
from rheostat.infra.store.bundles import BundledFile, BundleRef, fetch_bundle, publish_bundle
from rheostat.infra.store.contracts import Store
from rheostat.infra.store.staging import find_readable_store
from rheostat.models.modeling.directory import meta_policy
from rheostat.models.modeling.merging import is_adapter
from rheostat.models.modeling.safetensors import list_saved_shapes
from rheostat.models.modeling.weight_files import is_quantized
from rheostat.models.modeling.weighted_sum import Outline, write_full_merge
from rheostat.models.records.merges import MergeWork, Parent
from rheostat.models.training.publishing import Put
from rheostat.models.training.ranks import Ranks, broadcast_bytes


def publish_average(
    store: Store,
    policy: BundleRef,
    reference: BundleRef,
    *,
    decay: float,
    ranks: Ranks,
    put: Put,
    on_progress: Callable[[], None],
) -> BundleRef:
    """Publish the next reference, decay x `reference` + (1 - decay) x `policy`, and return its bundle on all ranks.
    Rank 0 reads and writes one tensor at a time, so no model is loaded. `put` selects how the files are stored, and
    `on_progress` is called after each tensor. Collective: every rank must call this. Raises BadInput on rank 0 if the
    files of the reference do not contain the tensors of the policy."""
    bundle = BundleRef(key="", digest="", bytes=0)
    if ranks.rank == 0:
        target = store.staging() if put == "staged" else store
        new, old = (fetch_bundle(find_readable_store(store, each), each) for each in (policy, reference))
        with target.scratch() as scratch:
            written = write_average(new, old, scratch, decay=decay, on_progress=on_progress)
            prefix = policy.key.rpartition("/")[0]
            bundle = publish_bundle(
                target, scratch, prefix=prefix, written_files=written, durable=put == "durable", on_progress=on_progress
            )
    return BundleRef.model_validate_json(broadcast_bytes(bundle.model_dump_json().encode(), ranks))


def write_average(
    policy: Path, reference: Path, target: Path, *, decay: float, on_progress: Callable[[], None] = lambda: None
) -> dict[str, BundledFile]:
    """Write decay x `reference` + (1 - decay) x `policy` into the empty directory `target`, and return the size and
    digest of each weight file by name (TR-DPO, arXiv 2404.09656, soft update with α = 1 - decay).

    The average is stored in float32, because bfloat16 would round away the changes of an iteration if `decay` is close
    to 1. Raises BadInput if the files of the reference do not contain the tensors of the policy.
    """
    _require_tensors(reference, {name: each.shape for name, (_, each) in Outline.read(policy).files.items()})
    parents = (Parent("policy", policy, 1 - decay), Parent("reference", reference, decay))
    return write_full_merge(MergeWork(parents, target, dtype="float32"), on_progress=on_progress)


def check_initial_policy(directory: Path) -> None:
    """Raise BadInput if the weights of the initial policy cannot be averaged with those of its later versions."""
    if not is_adapter(directory):  # adapters are merged into a model that is saved again
        _require_tensors(directory, list_saved_shapes(meta_policy(directory)))


def _require_tensors(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise BadInput if a model directory is quantized or lacks a tensor of a policy with these tensors. Tensors that
    only the directory has, such as a tied head in an imported model, are ignored."""
    stored, reason = Outline.read(directory).files, ""
    for name, shape in shapes.items():
        if name not in stored or stored[name][1].shape != shape:
            reason = f"they do not contain the tensor {name} with the shape {shape}, which the trained policy has"
            break
    if is_quantized(directory):
        reason = "they are quantized"
    if reason:
        raise BadInput(
            f"ema_decay cannot be used with the files in {directory}, because {reason}. Load the initial policy with "
            "transformers, save it again with save_pretrained, and start a new run with it. Or use reset_every"
        )
