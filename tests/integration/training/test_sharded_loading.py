"""Under ZeRO-3 a rank loads only its shard of each weight, with the same bits as if it loaded the whole model."""

import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from infra.store.bundles import publish_bundle
from infra.store.storage import open_store
from models.commands.memory import loading_bytes
from models.config.lora import LoraConfig
from models.config.objectives import UpdateConfig
from models.modeling.adapters import outline
from models.modeling.logprobs import TokenLogprobs
from models.modeling.parameter_storage import ParameterStorage
from models.modeling.policy import load_policy
from models.modeling.trials import float32_trials
from models.records.versions import ModelVersion
from models.training import versions
from models.training.ranks import join_ranks
from tests.support.model_families import write_family
from tests.support.processes import preload
from tests.support.update_workers import CONFIG, change, start_ranks, start_worker, update_work

preload(__name__)


def _load_whole(update, *, ranks):
    return ParameterStorage(torch.float32, ranks.device)


def _update_both_ways(rank, ranks, port, uri, policy, configs):
    found = {}
    for name, config in configs.items():
        for way, storage in (("shards", versions.trained_storage), ("whole", _load_whole)):
            kept, versions.trained_storage = versions.trained_storage, storage
            worker = start_worker(uri, config, rank=rank, ranks=ranks, port=port)
            model = worker.update(update_work(uri, policy)).model
            found.setdefault(name, {})[way] = (model.weights, model.adapter, model.state)
            worker.close()
            versions.trained_storage = kept
    torch.save(found, Path(uri, f"found-{rank}.pt"))


@pytest.mark.system
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_an_update_of_shards_that_were_loaded_alone_has_the_bits_of_one_after_a_whole_load(uri, family, tmp_path):
    write_family(family, tmp_path / "policy")
    store = open_store(f"{uri}/run")
    policy = ModelVersion(version=0, weights=publish_bundle(store, tmp_path / "policy", prefix="policies"))
    sharded = change(CONFIG, zero_stage=3)
    configs = {
        "float32": sharded,
        "bfloat16": change(sharded, dtype="bfloat16"),
        "adapters": change(sharded, dtype="bfloat16", lora=LoraConfig(rank=4)),
    }
    start_ranks(_update_both_ways, uri, policy, configs)
    for name, ways in torch.load(Path(uri, "found-0.pt"), weights_only=False).items():
        assert ways["shards"] == ways["whole"], name


class _AllocatedBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that exist at a time, except mapped files."""

    def __init__(self):
        super().__init__()
        self.peak, self._sizes = 0, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if storage.filename is None and storage._cdata not in self._sizes:
                    self._sizes[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self._sizes.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self._sizes.values()))
        return result


def _count(rank, ranks, port, uri, directory, updates):
    group = join_ranks(rank, ranks, address="127.0.0.1", port=port)
    peaks = []
    for update in updates:
        with _AllocatedBytes() as counted, float32_trials():
            storage = versions.trained_storage(update, ranks=group)
            TokenLogprobs(load_policy(directory, storage=storage), temperature=1.0)
        peaks.append(counted.peak)
    torch.save(peaks, Path(uri, f"peaks-{rank}.pt"))


@pytest.mark.system
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_loading_needs_at_most_the_shard_and_the_estimated_copies_of_one_weight(uri, family, tmp_path):
    write_family(family, tmp_path, num_hidden_layers=24)
    updates = [UpdateConfig(zero_stage=3, dtype=dtype) for dtype in ("float32", "bfloat16")]
    start_ranks(_count, uri, tmp_path, updates)
    model = outline(load_policy(tmp_path, device="meta"))
    logits = 3 * 4 * 4 * model.vocab_size  # three float32 tensors of four tokens, which such a small model notices
    for rank in range(2):
        for update, peak in zip(updates, torch.load(Path(uri, f"peaks-{rank}.pt")), strict=True):
            number = 4 if update.dtype == "float32" else 2
            estimated = loading_bytes(update, model, ranks=2)
            assert model.parameters * number / 2 < peak <= estimated + logits < model.parameters * number
