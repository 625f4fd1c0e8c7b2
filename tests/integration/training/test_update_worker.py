"""The update worker on real processes: same work, same bits; what is not finite changes nothing."""

import json
import threading
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra.errors import BadInput, Damaged
from infra.store.bundles import delete_bundle, fetch_bundle, has_bundle, publish_bundle
from infra.store.shards import read_shard, write_shard
from infra.store.storage import open_store
from models.config.data import FileData
from models.config.objectives import NoKl, SequenceMean, UpdateConfig
from models.config.training import WarmupConfig
from models.data.problems import load_problems
from models.modeling.policy import build_scratch, save_policy
from models.records.schemas import SAMPLE_SCHEMA
from models.records.versions import ModelVersion
from models.records.work import WarmupWork
from models.text.tokenizer import scratch_tokenizer
from models.training.states import StateWriter
from tests.support.training import DATA, TINY
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
    take_updates,
    together,
    work,
)


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


def chain(uri, policy, updates, *, kept=()):
    """Updates one after another: their works, which keep the states of some versions, and what they made."""
    worker, works, outcomes = start(uri), [], []
    for number in range(1, updates + 1):
        version = outcomes[-1].model if outcomes else policy
        asked = replace(work(uri, version, reference=policy), total_iterations=updates, keeps_state=number in kept)
        works.append(asked)
        outcomes.append(worker.update(asked))
    return works, outcomes


def test_an_update_writes_its_weights_once_reads_none_of_them_and_leaves_its_state_for_later(uri, policy, monkeypatch):
    worker, write, may_write = start(uri), StateWriter._write, threading.Event()

    def later(*arguments):
        assert may_write.wait(60)
        write(*arguments)

    monkeypatch.setattr(StateWriter, "_write", later)
    asked, made = replace(work(uri, policy), total_iterations=3), []
    written, read = bytes_moved(lambda: made.append(worker.update(asked).model), monkeypatch)
    may_write.set()
    worker.close()
    assert made[0].weights.bytes < written < 1.1 * made[0].weights.bytes + 20_000  # and the tokenizer
    assert read < 150_000 + policy.weights.bytes, "what was loaded at the start, samples, the tokenizer"
    assert fetch_bundle(open_store(f"{uri}/run"), made[0].state).is_dir()


def test_a_state_is_in_the_store_when_the_next_update_ends_and_the_last_when_it_ends_itself(uri, policy):
    _, outcomes = chain(uri, policy, 2, kept=(1, 2))
    assert all(has_bundle(open_store(f"{uri}/run"), outcome.model.state) for outcome in outcomes)


def test_a_lost_state_is_learnt_again_and_comes_back(uri, policy):
    works, outcomes = chain(uri, policy, 3, kept=(1, 2, 3))
    store, lost = open_store(f"{uri}/run"), outcomes[1].model.state
    delete_bundle(store, lost)
    again = start(uri).update(replace(works[2], past=(works[1],)))
    assert (again.model, again.metrics) == (outcomes[2].model, outcomes[2].metrics)
    assert has_bundle(store, lost)


def test_updates_since_the_newest_state_are_taken_again_to_the_same_bits(uri, policy):
    works, outcomes = chain(uri, policy, 4, kept=(1, 4))
    assert [outcome.model.state is not None for outcome in outcomes] == [True, False, False, True]
    again = start(uri).update(replace(works[3], past=tuple(works[1:3])))
    assert (again.model, again.metrics) == (outcomes[3].model, outcomes[3].metrics)
    everything = start(uri).update(replace(works[3], past=tuple(works[:3])))
    assert everything.model == outcomes[3].model


def test_an_update_that_is_taken_again_from_other_samples_is_damage_that_names_it(uri, policy):
    works, _ = chain(uri, policy, 3, kept=(1,))
    other = replace(works[1], samples=work(uri, policy, seed=9).samples)
    with pytest.raises(Damaged, match=r"iteration 1: its update was taken again .* expected weights .* found weights"):
        start(uri).update(replace(works[2], past=(other,)))


def test_an_optimizer_that_moved_while_the_weights_did_not_is_known_by_its_version(uri, policy):
    still = CONFIG.model_copy(update={"learning_rate": 0.0})
    hot = start(uri, still)
    first = replace(work(uri, policy), total_iterations=9, keeps_state=False)
    version = hot.update(first).model
    assert version.digest == policy.digest
    second = replace(work(uri, version, reference=policy), total_iterations=2)
    assert hot.update(second).model == start(uri, still).update(replace(second, past=(first,))).model


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


@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (3, "float32"), (2, "bfloat16")])
def test_layers_that_are_computed_again_change_no_bit_of_an_update(uri, policy, stage, dtype):
    kept, again = (
        start(uri, staged(stage, dtype).model_copy(update={"activation_checkpointing": on})).update(work(uri, policy))
        for on in (False, True)
    )
    assert (again.model, again.metrics) == (kept.model, kept.metrics)


def test_attention_that_is_asked_for_is_what_policy_and_reference_compute(uri, policy):
    asked = start(uri, CONFIG.model_copy(update={"attention": "eager"}))
    outcome, plain = (worker.update(work(uri, policy)) for worker in (asked, start(uri)))
    models = (asked._models.policy.trainer._model, asked._models._reference[1].model)
    assert [model.config._attn_implementation for model in models] == ["eager_of_shared_prompts"] * 2
    assert outcome.model.weights != plain.model.weights
    assert outcome.metrics["loss"] == pytest.approx(plain.metrics["loss"], abs=1e-5)


OFFLOADED = [(1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "parameters")]


@pytest.mark.parametrize(("stage", "offload"), OFFLOADED)
def test_an_offloaded_update_is_the_same_bits_hot_and_loaded_anew(uri, policy, stage, offload):
    config = staged(stage, "bfloat16")
    plain, away = (start(uri, config.model_copy(update={"offload": part})) for part in ("none", offload))
    first, expected = (worker.update(work(uri, policy)).model for worker in (away, plain))
    assert first == expected
    again = work(uri, first, reference=policy)
    second = plain.update(again).model
    assert away.update(again).model == second
    assert start(uri, config.model_copy(update={"offload": offload})).update(again).model == second
    zero = away._models.policy.trainer._engine._config.zero_config
    assert zero.offload_optimizer.device == "cpu"
    assert (zero.offload_param is not None) == (offload == "parameters")


@pytest.mark.system
def test_two_ranks_that_offload_end_at_the_same_bits(uri, policy):
    pairs = [(staged(stage), staged(stage).model_copy(update={"offload": offload})) for stage, offload in OFFLOADED]
    together(take_updates, uri, [config for pair in pairs for config in pair], [policy] * 2 * len(pairs), "hot")
    last = [outcomes[-1].model for outcomes in read(uri, "hot")]
    assert last[0::2] == last[1::2]


@pytest.mark.parametrize(("given", "least"), [({"offload": "optimizer"}, 1), ({"offload": "parameters"}, 3)])
def test_a_stage_that_cannot_offload_is_refused(given, least):
    with pytest.raises(
        ValidationError, match=f"offload '{given['offload']}' needs zero_stage {least} or more, found 0"
    ):
        UpdateConfig(**given)


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


def as_the_trainer_says(uri, policy, asked):
    """The same work on samples whose behaviour is the policy itself, computed by transformers alone."""
    store = open_store(f"{uri}/run")
    model = AutoModelForCausalLM.from_pretrained(fetch_bundle(store, policy.weights))
    rows = read_shard(store, asked.samples[0]).to_pylist()
    for row in rows:
        tokens, prompt = torch.tensor([row["tokens"]]), row["num_prompt_tokens"]
        with torch.no_grad():
            logprobs_TV = (model(tokens).logits[0, prompt - 1 : -1] / 0.9).log_softmax(dim=-1)
        row["logprobs"] = logprobs_TV.gather(1, tokens[0, prompt:, None])[:, 0].tolist()
    samples = write_shard(store, pa.Table.from_pylist(rows, SAMPLE_SCHEMA), kind="samples", metadata={})
    return replace(asked, samples=(samples,))


def test_log_probs_that_the_engine_computed_exactly_are_not_computed_again_and_lead_to_the_same_policy(uri, policy):
    asked = as_the_trainer_says(uri, policy, work(uri, policy))
    computed, given = (start(uri).update(replace(asked, exact_behaviour=exact)) for exact in (False, True))
    assert 0 < given.metrics["mismatch_tokens"] < computed.metrics["mismatch_tokens"] == computed.metrics["tokens"]
    assert given.metrics["mismatch_difference_max"] < 1e-5
    before, after, other = (
        load_file(fetch_bundle(open_store(f"{uri}/run"), model.weights) / "model.safetensors")
        for model in (policy, computed.model, given.model)
    )
    learnt = sum(float((after[name] - before[name]).norm()) for name in after)
    assert sum(float((other[name] - after[name]).norm()) for name in after) < 1e-3 * learnt
    assert given.metrics["loss"] == pytest.approx(computed.metrics["loss"], abs=1e-5)


def test_where_an_earlier_version_wrote_a_token_log_probs_are_computed_all_the_same(uri, policy):
    asked = work(uri, policy, stalest=1)
    computed, given = (start(uri).update(replace(asked, exact_behaviour=exact)) for exact in (False, True))
    assert (given.model, given.metrics) == (computed.model, computed.metrics)


def said(uri, version, rows):
    """Log-probs of completions by transformers alone, one behind the other."""
    model = AutoModelForCausalLM.from_pretrained(fetch_bundle(open_store(f"{uri}/run"), version.weights))
    found = []
    for row in rows:
        tokens, prompt = torch.tensor(row["tokens"]), row["num_prompt_tokens"]
        with torch.no_grad():
            logprobs_TV = (model(tokens[None]).logits[0, prompt - 1 : -1] / 0.9).log_softmax(dim=-1)
        found.append(logprobs_TV.gather(1, tokens[prompt:, None])[:, 0])
    return torch.cat(found)


def test_a_second_epoch_compares_with_the_policy_before_the_first(uri, policy):
    config = UNCLIPPED.model_copy(update={"kl": NoKl()})
    asked = as_the_trainer_says(uri, policy, work(uri, policy))
    once, twice = (
        start(uri, config.model_copy(update={"epochs": epochs})).update(replace(asked, exact_behaviour=exact))
        for epochs, exact in ((1, False), (2, False))
    )
    rows = read_shard(open_store(f"{uri}/run"), asked.samples[0]).to_pylist()
    ratio_T = (said(uri, once.model, rows) - said(uri, policy, rows)).exp()
    advantages_T = torch.tensor([each for row in rows for each in row["advantages"]])
    clipped_T = ratio_T.clamp(1 - config.loss.clip_low, 1 + config.loss.clip_high)
    second = -float(torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T).mean())
    assert (ratio_T - 1).abs().max() > 0.01
    assert twice.metrics["loss"] == pytest.approx((once.metrics["loss"] + second) / 2, abs=1e-5)
    assert twice.metrics["mismatch_tokens"] == once.metrics["mismatch_tokens"]


def test_epochs_take_all_minibatches_as_often_and_end_where_engines_log_probs_lead(uri, policy):
    config = CONFIG.model_copy(update={"epochs": 3})
    asked = as_the_trainer_says(uri, policy, work(uri, policy))
    computed, given = (start(uri, config).update(replace(asked, exact_behaviour=exact)) for exact in (False, True))
    assert computed.metrics["steps"] == given.metrics["steps"] == 6
    assert given.metrics["loss"] == pytest.approx(computed.metrics["loss"], abs=1e-5)
    assert start(uri, config).update(replace(asked, exact_behaviour=False)).model == computed.model


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


def test_a_state_of_weights_in_another_precision_is_refused(uri, policy):
    first = start(uri).update(work(uri, policy)).model
    with pytest.raises(BadInput, match="expected one of bfloat16 weights, found float32"):
        start(uri, CONFIG.model_copy(update={"dtype": "bfloat16"})).update(work(uri, first))


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
    brief = replace(task, warmup=WarmupConfig(steps=5, batch_size=16))
    once, again = (start(uri).warmup(brief).model for _ in range(2))
    assert policy.weights != once.weights
    assert once == again


def test_warmup_leaves_out_what_iterations_leave_out(uri, policy, tmp_path):
    rows = [json.dumps({"prompt": f"{n} + 1 =", "answer": f"#### {n + 1}"}) for n in range(6)]
    long = json.dumps({"prompt": "7" * 60, "answer": "#### 7"})
    learnt = []
    for name, lines in (("few", rows), ("more", [rows[0], long, *rows[1:], long.replace("7", "8")])):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(lines))
        data = FileData(path=path, heldout_path=path, too_long="drop")
        task = WarmupWork(policy, data, WarmupConfig(steps=2, batch_size=8), seed=3, max_new_tokens=216)
        learnt.append(start(uri).warmup(task).model)
    assert learnt[0] == learnt[1] != policy


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
