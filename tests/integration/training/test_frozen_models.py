"""References and teachers under ZeRO-3: sharded over the ranks, with the log-probs of a whole model."""

import gc
from pathlib import Path

import pytest
import torch

from rheostat.infra.store.bundles import fetch_bundle, publish_bundle
from rheostat.infra.store.storage import open_store
from rheostat.models.config.lora import LoraConfig
from rheostat.models.modeling.layout import lay_out
from rheostat.models.modeling.policy import load_policy
from rheostat.models.modeling.trials import is_sharded
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.versions import ModelVersion
from tests.support.model_families import write_family
from tests.support.processes import preload
from tests.support.seeing import prompts_of, publish_seeing, write_media
from tests.support.training import publish_scratch
from tests.support.update_workers import CONFIG, change, start_ranks, start_worker, update_work

preload(__name__)

WHOLE, SHARDED = change(CONFIG, zero_stage=2), change(CONFIG, zero_stage=3)
CONFIGS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "reference in float32": {"dtype": "bfloat16", "reference_dtype": "float32"},
    "slices": {"sequence_parallel": 2},
}


def text(*completions: list[int]) -> list[ModelInput]:
    return [ModelInput.from_prompt([5, 6, 7]).append_completion(tokens) for tokens in completions]


def _score(rank, ranks, port, uri, versions, inputs, names):
    """Score micro-batches, one of them empty, with two versions of a model as references and as teachers."""
    found = {}
    for name in names:
        for stage, start in (("whole", WHOLE), ("shards", SHARDED)):
            config = change(start, **CONFIGS[name])
            worker = start_worker(uri, config, rank=rank, ranks=ranks, port=port)
            models, scores = worker._models, []
            if any(each.images for batch in inputs for each in batch):
                worker._show([write_media(f"{uri}/run")])
            own = inputs if config.sequence_parallel > 1 else inputs[rank:] + inputs[:rank]
            for version in (*versions, versions[0]):
                for forward in (models.reference(version, policy=versions[0]), models.teacher(version)):
                    scores += [forward(lay_out(batch)) for batch in own]
            parameters = [*models._reference._loaded[1]._module.parameters()]
            stored = sum(getattr(each, "ds_tensor", each).numel() for each in parameters)
            assert {is_sharded(each) for each in parameters} == {stage == "shards"}
            found.setdefault(name, {})[stage] = (scores, stored)
            worker.close()
    torch.save(found, Path(uri, f"scores-{rank}.pt"))


@pytest.mark.system
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "idefics3"])
def test_sharded_references_and_teachers_compute_the_bits_of_whole_models(uri, kind, tmp_path):
    store, versions = open_store(f"{uri}/run"), []
    inputs = [text([8, 9], [10]), text([11, 12, 13])]
    for seed in range(2):
        directory = tmp_path / f"policy-{seed}"
        if kind == "idefics3":
            versions.append(publish_seeing(f"{uri}/run", directory, kind, seed=seed))
            shown, blind = prompts_of(directory, [2, 0])
            inputs = [[shown.append_completion([9, 8])], [blind.append_completion([7])]]
        else:
            write_family(kind, directory, initializer_range=0.05 + 0.1 * seed)
            versions.append(ModelVersion(version=seed, weights=publish_bundle(store, directory, prefix="policies")))
    names = [name for name in CONFIGS if kind == "qwen3" or name in ("float32", "bfloat16")]
    start_ranks(_score, uri, versions, [*inputs, []], names)
    for rank in range(2):
        for name, ways in torch.load(Path(uri, f"scores-{rank}.pt")).items():
            (expected, whole), (found, shard) = ways["whole"], ways["shards"]
            assert whole / 2 <= shard < 0.51 * whole
            assert len(found) == len(expected) == 18
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0, msg=f"{name}, rank {rank}")
            third = len(found) // 3
            assert all(torch.equal(a, b) for a, b in zip(found[:third], found[2 * third :], strict=True))
            assert not torch.equal(torch.cat(found[:third]), torch.cat(found[third : 2 * third]))


def _count_bytes() -> int:
    """Return the bytes of all tensors that exist. Tensors that share memory count once."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize(
    "settings",
    [{}, {"zero_stage": 2, "dtype": "bfloat16"}, {"zero_stage": 3}, {"zero_stage": 3, "lora": LoraConfig(rank=4)}],
    ids=["whole", "bfloat16", "shards", "adapters"],
)
def test_closed_workers_keep_no_models(uri, policy, settings):
    reference, workers = publish_scratch(f"{uri}/run", Path(uri, "other"), seed=1), []
    size = load_policy(fetch_bundle(open_store(f"{uri}/run"), policy.weights)).num_parameters()
    before = _count_bytes()
    for _ in range(3):
        worker = start_worker(uri, change(CONFIG, **settings))
        worker.update(update_work(uri, policy, reference=reference))
        worker._models.teacher(policy)
        assert _count_bytes() - before > 2 * size
        worker.close()
        workers.append(worker)
    assert _count_bytes() - before < size / 4
