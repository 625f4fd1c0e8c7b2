"""Under ZeRO-3 a rank loads only its shard of each weight, with the same bits as if it loaded the whole model."""

import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rheostat.infra.store.bundles import publish_bundle
from rheostat.infra.store.storage import open_store
from rheostat.models.config.lora import LoraConfig
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.inspection.memory import frozen_bytes, loading_bytes
from rheostat.models.modeling.adapters import outline
from rheostat.models.modeling.critic import TokenValues, load_critic, write_critic
from rheostat.models.modeling.logprobs import TokenLogprobs
from rheostat.models.modeling.parameter_storage import ParameterStorage
from rheostat.models.modeling.policy import load_policy
from rheostat.models.modeling.reward_model import load_reward_model
from rheostat.models.modeling.trials import float32_trials
from rheostat.models.records.versions import ModelVersion
from rheostat.models.training import versions
from rheostat.models.training.frozen import load_frozen_policy
from rheostat.models.training.ranks import join_ranks
from tests.support.model_families import write_family
from tests.support.processes import preload
from tests.support.update_workers import CONFIG, change, start_ranks, start_worker, update_work

preload(__name__)


def _load_whole(update, *, ranks):
    return ParameterStorage(torch.float32, ranks.device)


def _update_both_ways(rank, ranks, port, uri, policy, configs):
    found = {}
    for name, config in configs.items():
        for way, storage in (("shards", versions.choose_storage), ("whole", _load_whole)):
            kept, versions.choose_storage = versions.choose_storage, storage
            worker = start_worker(uri, config, rank=rank, ranks=ranks, port=port)
            model = worker.update(update_work(uri, policy)).model
            found.setdefault(name, {})[way] = (model.weights, model.adapter, model.state)
            worker.close()
            versions.choose_storage = kept
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
        "magnitudes": change(sharded, lora=LoraConfig(rank=4, dora=True)),
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


def _count(rank, ranks, port, uri, directory, critic, updates):
    """Load a policy, and in bfloat16 also a critic, a reference and a teacher. Store the peak after each of them."""
    group = join_ranks(rank, ranks, address="127.0.0.1", port=port)
    peaks = []
    for update in updates:
        with _AllocatedBytes() as counted, float32_trials():
            policy = TokenLogprobs(
                load_policy(directory, storage=versions.choose_storage(update, ranks=group)), temperature=1.0
            )
            found, values, frozen = [counted.peak], None, []
            if others := (update.for_reference, update) if update.dtype == "bfloat16" else ():
                values = TokenValues(load_critic(critic, storage=versions.choose_storage(update, ranks=group)))
                found.append(counted.peak)
            for config in others:
                frozen.append(load_frozen_policy(directory, config, temperature=1.0, ranks=group))
                found.append(counted.peak)
        peaks.append(found)
        for model in frozen:
            model.close()
        del policy, values, frozen
    torch.save(peaks, Path(uri, f"peaks-{rank}.pt"))


@pytest.mark.system
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_loading_needs_at_most_the_shards_and_the_estimated_copies_of_one_weight(uri, family, tmp_path):
    write_family(family, tmp_path / "policy", num_hidden_layers=24)
    write_critic(None, tmp_path / "policy", tmp_path / "critic")
    updates = [UpdateConfig(zero_stage=3, dtype=dtype, reference_dtype="float32") for dtype in ("float32", "bfloat16")]
    start_ranks(_count, uri, tmp_path / "policy", tmp_path / "critic", updates)
    model = outline(load_policy(tmp_path / "policy", device="meta"))
    critic = outline(load_reward_model(tmp_path / "critic", device="meta").model)
    logits = 3 * 4 * 4 * model.vocab_size  # three float32 tensors of four tokens, which such a small model notices
    for rank in range(2):
        for update, peaks in zip(updates, torch.load(Path(uri, f"peaks-{rank}.pt")), strict=True):
            kept = whole = 0
            models = ((update, model), (update, critic), (update.for_reference, model), (update, model))
            assert len(peaks) == (1 if update.dtype == "float32" else 4)
            for peak, (config, each) in zip(peaks, models, strict=False):
                before, kept = kept, kept + frozen_bytes(config, each, ranks=2)
                whole += frozen_bytes(config, each, ranks=1)
                assert before < kept < peak <= kept + loading_bytes(config, each) + logits < whole
