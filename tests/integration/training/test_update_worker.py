"""The update worker on real processes: same work, same bits; what is not finite changes nothing."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra.errors import BadInput
from infra.store.bundles import fetch_bundle, publish_bundle
from infra.store.shards import read_shard, write_shard
from infra.store.storage import open_store
from models.config.objectives import SequenceMean
from models.config.training import WarmupConfig
from models.data.problems import load_problems
from models.modeling.policy import build_scratch, save_policy
from models.records.schemas import SAMPLE_SCHEMA
from models.records.versions import ModelVersion
from models.records.work import WarmupWork
from models.text.tokenizer import scratch_tokenizer
from tests.support.training import DATA, TINY, publish_scratch
from tests.support.update_workers import (
    CONFIG,
    UNCLIPPED,
    bytes_moved,
    files,
    gradients,
    read,
    same_after_restart,
    staged,
    start,
    work,
)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path)


@pytest.fixture
def policy(uri: str) -> ModelVersion:
    return publish_scratch(f"{uri}/run", Path(uri, "scratch"))


# ---- one rank
def test_an_update_is_the_same_bits_hot_reloaded_and_repeated(uri, policy):
    hot = start(uri)
    first = hot.update(work(uri, policy)).model
    again = work(uri, first, reference=policy)
    outcome = hot.update(again)
    assert outcome.model.version == 2
    assert outcome.model.weights != first.weights
    assert hot.update(again).model == outcome.model
    cold = start(uri).update(again)
    assert (cold.model, cold.metrics) == (outcome.model, outcome.metrics)


def test_an_update_writes_what_it_publishes_once_and_reads_none_of_it(uri, policy, monkeypatch):
    worker = start(uri)
    first = worker.update(work(uri, policy)).model
    second = []
    again = work(uri, first, reference=policy)
    written, read = bytes_moved(lambda: second.append(worker.update(again).model), monkeypatch)
    published = second[0].weights.bytes + second[0].state.bytes
    assert published < written < 1.1 * published
    assert read < 0.25 * published  # samples, the tokenizer


def test_another_seed_makes_another_policy(uri, policy):
    assert start(uri).update(work(uri, policy)).model != start(uri).update(work(uri, policy, seed=5)).model


def test_a_published_policy_loads_as_any_model_does_with_its_parents_tokenizer(uri, policy):
    outcome = start(uri).update(work(uri, policy))
    directory, parent = files(uri, outcome, "weights"), fetch_bundle(open_store(f"{uri}/run"), policy.weights)
    assert AutoModelForCausalLM.from_pretrained(directory)(torch.tensor([[5, 6]])).logits.shape == (1, 2, 354)
    assert AutoTokenizer.from_pretrained(directory).encode("Ana has 3 pens")
    assert (directory / "tokenizer.json").read_bytes() == (parent / "tokenizer.json").read_bytes()
    assert {path.suffix for path in files(uri, outcome, "state").iterdir()} == {".json", ".safetensors"}


def test_a_learning_rate_of_zero_leaves_the_weights_bit_identical(uri, policy):
    still = start(uri, CONFIG.model_copy(update={"learning_rate": 0.0})).update(work(uri, policy))
    assert still.model.weights == policy.weights
    assert still.metrics["grad_norm_max"] > 0


def test_without_samples_the_policy_stays_as_it_is(uri, policy):
    outcome = start(uri).update(work(uri, policy, prompts=0))
    assert outcome.model == ModelVersion(version=1, weights=policy.weights, state=None)
    assert outcome.metrics == {"quarantined": 0, "steps": 0, "samples": 0, "kl_coefficient": 0.1}


def test_groups_without_a_token_in_the_loss_have_no_weight_in_it(uri, policy):
    lean, filled = (start(uri, UNCLIPPED).update(work(uri, policy, filling=count)) for count in (0, 3))
    for name in ("loss", "kl", "tokens", "grad_norm_max"):
        assert filled.metrics[name] == pytest.approx(lean.metrics[name], rel=1e-5)
    assert filled.metrics["samples"] == lean.metrics["samples"] + 12


def test_groups_without_a_token_in_the_loss_take_no_step_of_their_own(uri, policy):
    alone = start(uri).update(work(uri, policy, prompts=0, filling=3))
    assert alone.model == ModelVersion(version=1, weights=policy.weights, state=None)
    one = start(uri).update(work(uri, policy, prompts=1, filling=1))  # two minibatches, of which one has no token
    assert one.metrics["steps"] == 1


def test_tokens_that_are_too_stale_take_no_step_and_change_no_count(uri, policy):
    config = UNCLIPPED.model_copy(update={"max_staleness": 0})
    old = work(uri, policy, prompts=2)
    rows = read_shard(open_store(f"{uri}/run"), old.samples[0]).to_pylist()
    for row in rows[1:]:
        row["staleness"] = [1] * len(row["staleness"])
    first = write_shard(
        open_store(f"{uri}/run"), pa.Table.from_pylist(rows, SAMPLE_SCHEMA), kind="samples", metadata={}
    )
    mixed = start(uri, config).update(replace(old, samples=(first,)))
    tokens = sum(len(row["logprobs"]) for row in rows)
    assert mixed.metrics["tokens"] == tokens
    assert mixed.metrics["too_stale_fraction"] == pytest.approx(1 - len(rows[0]["logprobs"]) / tokens)
    rows[0]["staleness"] = [1] * len(rows[0]["staleness"])
    none = write_shard(open_store(f"{uri}/run"), pa.Table.from_pylist(rows, SAMPLE_SCHEMA), kind="samples", metadata={})
    unmoved = start(uri, config).update(replace(old, samples=(none,)))
    assert unmoved.model == ModelVersion(version=1, weights=policy.weights, state=None)


def test_every_fresh_token_is_compared_with_what_generated_it_before_anything_is_learnt(uri, policy):
    asked = work(uri, policy, stalest=1)
    rows = read_shard(open_store(f"{uri}/run"), asked.samples[0]).to_pylist()
    fresh = sum(age == 0 for row in rows for age in row["staleness"])
    many, once = (start(uri, config).update(asked).metrics for config in (CONFIG, UNCLIPPED))
    assert many["mismatch_tokens"] == once["mismatch_tokens"] == fresh
    assert many["mismatch_difference_mean"] == pytest.approx(once["mismatch_difference_mean"], rel=1e-5)
    assert 0 < many["mismatch_difference_mean"] < many["mismatch_difference_max"]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_poisoned_advantage_changes_neither_weights_nor_what_comes_after(uri, policy, poison):
    worker = start(uri)
    first = worker.update(work(uri, policy)).model
    spoilt = worker.update(work(uri, first, advantages=[poison]))
    assert spoilt.model == ModelVersion(version=2, weights=first.weights, state=first.state)
    assert spoilt.metrics["quarantined"] == 1
    after = work(uri, spoilt.model)
    assert worker.update(after).model == start(uri).update(after).model


def test_a_model_that_overflows_is_quarantined(uri, tmp_path):
    tokenizer = scratch_tokenizer(TINY, load_problems(DATA, "train", 0))
    model = build_scratch(TINY, tokenizer, seed=0)
    model.model.norm.weight.data.fill_(3e38)
    save_policy(model, tokenizer, tmp_path / "huge")
    weights = publish_bundle(open_store(f"{uri}/run"), tmp_path / "huge", prefix="policies")
    outcome = start(uri).update(work(uri, ModelVersion(version=0, weights=weights)))
    assert outcome.metrics["quarantined"] == 1
    assert outcome.model.weights == weights


def test_the_reference_itself_costs_no_penalty_at_the_first_step(uri, policy):
    worker = start(uri, CONFIG.model_copy(update={"minibatches": 1}))
    first = worker.update(work(uri, policy))
    assert first.metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert worker.update(work(uri, first.model, reference=policy)).metrics["kl"] > 1e-5


def test_state_of_another_stage_is_refused(uri, policy):
    first = start(uri).update(work(uri, policy)).model
    with pytest.raises(BadInput, match="'zero_stage': 0"):
        start(uri, CONFIG.model_copy(update={"zero_stage": 2})).update(work(uri, first))


def test_progress_counts_passes(uri, policy):
    worker = start(uri)
    worker.update(work(uri, policy))
    assert worker.progress() > 4


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_the_size_of_a_pass_changes_no_gradient(uri, policy, aggregation):
    loss = CONFIG.loss.model_copy(update={"aggregation": SequenceMean()} if aggregation == "sequence" else {})
    base = UNCLIPPED.model_copy(update={"loss": loss})
    small, large = (
        start(uri, base.model_copy(update={"microbatch_tokens": size})).update(work(uri, policy)) for size in (40, 9999)
    )
    assert small.metrics["loss"] == pytest.approx(large.metrics["loss"], abs=1e-6)
    np.testing.assert_allclose(gradients(uri, small), gradients(uri, large), atol=1e-6)


def test_warmup_teaches_and_leaves_no_optimizer_state(uri, policy):
    task = WarmupWork(policy=policy, data=DATA, warmup=WarmupConfig(steps=40, batch_size=16), seed=3)
    outcome = start(uri).warmup(task)
    assert outcome.metrics["loss_last"] < 0.8 * outcome.metrics["loss_first"]
    assert (outcome.model.version, outcome.model.state) == (0, None)
    assert start(uri).warmup(task).model == outcome.model


def test_an_update_after_warmup_starts_as_in_a_new_process(uri, policy):
    worker = start(uri)
    warm = worker.warmup(WarmupWork(policy=policy, data=DATA, warmup=WarmupConfig(steps=3, batch_size=4), seed=3))
    assert worker.update(work(uri, warm.model)).model == start(uri).update(work(uri, warm.model)).model


@pytest.mark.system
def test_two_ranks_continue_bit_identically_in_new_processes_and_agree_with_one(uri, policy):
    same_after_restart(uri, policy, [UNCLIPPED, staged(2)], ranks=2)
    first = read(uri, "hot")[0][0]
    alone = start(uri, UNCLIPPED.model_copy(update={"microbatch_tokens": 9999})).update(work(uri, policy))
    assert first.metrics["loss"] == pytest.approx(alone.metrics["loss"], abs=1e-6)
    np.testing.assert_allclose(gradients(uri, first), gradients(uri, alone), atol=1e-6)


@pytest.mark.slow
def test_every_stage_and_precision_continues_bit_identically_in_new_processes(uri, policy):
    configs = [staged(stage, dtype) for dtype in ("float32", "bfloat16") for stage in range(4)]
    same_after_restart(uri, policy, configs, ranks=2)
    weights = [outcomes[-1].model.weights for outcomes in read(uri, "hot")]
    assert len({weight.digest for weight in weights[4:]}) == 1
