"""Weights that ZeRO-3 shards over the ranks are published tensor by tensor."""

import deepspeed
import pytest

from rheostat.infra.store.bundles import fetch_bundle
from rheostat.infra.store.storage import open_store
from tests.support.update_workers import CONFIG, change, start_worker, update_work


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_publishing_gathers_one_tensor_at_a_time_and_writes_the_gathered_weights(
    uri, policy, dtype, monkeypatch, tmp_path
):
    worker, sizes = start_worker(uri, change(CONFIG, zero_stage=3, dtype=dtype)), []
    gather = deepspeed.zero.GatheredParameters

    def counted(parameters, **options):
        sizes.append(sum(parameter.ds_numel for parameter in parameters))
        return gather(parameters, **options)

    monkeypatch.setattr(deepspeed.zero, "GatheredParameters", counted)
    model = worker.update(update_work(uri, policy)).model
    trainer = worker._models.policy.trainer
    everything = [*trainer._model.parameters()]
    assert len(sizes) >= len(everything)
    assert max(sizes) == max(parameter.ds_numel for parameter in everything)
    with gather(everything):
        files = trainer._module.save(tmp_path / "whole")
    stored = fetch_bundle(open_store(f"{uri}/run"), model.weights)
    for name in files:
        assert (stored / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("stage", [0, 3])
def test_writing_weights_counts_as_progress(uri, policy, stage):
    worker = start_worker(uri, change(CONFIG, zero_stage=stage))
    model = worker.update(update_work(uri, policy)).model
    before = worker.progress()
    worker._models.policy.describe(model, version=2)
    assert worker.progress() >= before + len([*worker._models.policy.trainer._model.parameters()])
