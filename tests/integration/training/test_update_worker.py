"""The update worker: equal work gives equal bits, and values that are not finite change nothing."""

import json
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rheostat.infra.errors import BadInput
from rheostat.infra.store.bundles import fetch_bundle, has_bundle, publish_bundle
from rheostat.infra.store.storage import open_store
from rheostat.models.config.data import FileData
from rheostat.models.config.divergence import NoKl
from rheostat.models.config.optimizers import Adam8bit, Muon
from rheostat.models.config.policy_losses import SequenceMean
from rheostat.models.config.training import WarmupConfig
from rheostat.models.data.problems import load_problems
from rheostat.models.modeling.policy import build_scratch, save_policy
from rheostat.models.records.versions import ModelVersion
from rheostat.models.records.work import WarmupWork
from rheostat.models.text.tokenizer import scratch_tokenizer
from rheostat.models.training.states import StateWriter
from tests.support.training import DATA, TINY
from tests.support.update_workers import (
    CONFIG,
    LORA,
    UNCLIPPED,
    bytes_moved,
    chain,
    change,
    distance,
    fetch_part,
    gradients,
    load_trained,
    read_rows,
    start_worker,
    update_once,
    update_work,
    with_rows,
)

AGAIN = {"activation_checkpointing": True}
HALF = [{"zero_stage": stage, "dtype": "bfloat16"} for stage in range(4)]
OFFLOADED = [(HALF[stage], {"offload": "optimizer"}) for stage in (1, 2, 3)] + [(HALF[3], {"offload": "parameters"})]


# ---- one rank
@pytest.mark.thorough_after(1)
@pytest.mark.parametrize(
    "settings",
    [{}, {"lora": LORA}, {"optimizer": Muon()}, {"optimizer": Adam8bit()}, {"optimizer": Adam8bit(), "zero_stage": 2}],
)
def test_an_update_gives_the_same_bits_repeated_and_in_a_new_worker(uri, policy, settings):
    config = change(CONFIG, **settings)
    hot = start_worker(uri, config)
    first = hot.update(update_work(uri, policy)).model
    again = update_work(uri, first, reference=policy)
    outcome = hot.update(again)
    assert outcome.model.version == 2
    assert outcome.model.digest != first.digest
    assert hot.update(again).model == outcome.model
    cold = start_worker(uri, config).update(again)
    assert (cold.model, cold.metrics) == (outcome.model, outcome.metrics)


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize(
    ("settings", "measures_rounding"),
    [
        ({"dtype": "bfloat16"}, False),
        ({"dtype": "bfloat16", "zero_stage": 3}, False),
        ({"dtype": "bfloat16", "reference_dtype": "float32"}, True),
        ({}, False),
    ],
)
def test_the_divergence_of_an_unchanged_policy_from_a_reference_in_the_same_precision_is_0(
    uri, policy, settings, measures_rounding
):
    outcome = update_once(uri, policy, change(UNCLIPPED, **settings))
    assert (outcome.metrics["kl"] != 0) == measures_rounding


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize(
    ("settings", "saving"), [({}, AGAIN), ({"zero_stage": 3}, AGAIN), (HALF[2], AGAIN), *OFFLOADED]
)
def test_recomputing_layers_and_offloading_change_no_bit_of_an_update(uri, policy, settings, saving):
    config = change(CONFIG, **settings, **saving)
    frugal, plain = start_worker(uri, config), start_worker(uri, change(CONFIG, **settings))
    works = [update_work(uri, policy)]
    for _ in range(2):
        found, expected = frugal.update(works[-1]), plain.update(works[-1])
        assert found.model == expected.model
        assert found.metrics == expected.metrics or saving != AGAIN  # gradient norms are summed in another order
        works.append(update_work(uri, found.model, reference=policy))
    assert start_worker(uri, config).update(works[1]).model == found.model
    if part := saving.get("offload"):
        zero = frugal._models.policy.trainer._engine._config.zero_config
        assert zero.offload_optimizer.device == "cpu"
        assert (zero.offload_param is not None) == (part == "parameters")


def test_an_update_writes_its_weights_once_reads_none_and_writes_its_state_later(uri, policy, monkeypatch):
    worker, write, may_write = start_worker(uri), StateWriter._write, threading.Event()

    def later(*arguments):
        assert may_write.wait(240)
        write(*arguments)

    monkeypatch.setattr(StateWriter, "_write", later)
    asked, made = replace(update_work(uri, policy), total_iterations=3), []
    written, read = bytes_moved(lambda: made.append(worker.update(asked).model), monkeypatch)
    may_write.set()
    worker.close()
    assert made[0].weights.bytes < written < 1.1 * made[0].weights.bytes + 20_000  # and the tokenizer
    assert read < 150_000 + policy.weights.bytes, "what was loaded at the start, samples, the tokenizer"
    assert fetch_bundle(open_store(f"{uri}/run"), made[0].state).is_dir()


def test_each_state_is_stored_before_the_next_update_ends_and_the_last_state_with_its_update(uri, policy):
    _, outcomes = chain(uri, policy, 2, kept=(1, 2))
    assert all(has_bundle(open_store(f"{uri}/run"), outcome.model.state) for outcome in outcomes)


def test_an_optimizer_that_stepped_without_changing_the_weights_is_recognized_by_its_version(uri, policy):
    still = change(CONFIG, learning_rate=0.0)
    hot = start_worker(uri, still)
    first = replace(update_work(uri, policy), total_iterations=9, keeps_state=False)
    outcome = hot.update(first)
    assert outcome.metrics["grad_norm_max"] > 0
    assert (outcome.model.weights, outcome.model.digest) == (policy.weights, policy.digest)
    second = replace(update_work(uri, outcome.model, reference=policy), total_iterations=2)
    assert hot.update(second).model == start_worker(uri, still).update(replace(second, past=(first,))).model


def test_another_seed_makes_another_policy(uri, policy):
    assert update_once(uri, policy).model != update_once(uri, policy, seed=5).model


def test_a_published_policy_loads_as_any_model_does_with_its_parents_tokenizer(uri, policy):
    outcome = update_once(uri, policy)
    directory, parent = fetch_part(uri, outcome, "weights"), fetch_bundle(open_store(f"{uri}/run"), policy.weights)
    assert AutoModelForCausalLM.from_pretrained(directory)(torch.tensor([[5, 6]])).logits.shape == (1, 2, 354)
    assert AutoTokenizer.from_pretrained(directory).encode("Ana has 3 pens")
    assert (directory / "tokenizer.json").read_bytes() == (parent / "tokenizer.json").read_bytes()
    assert {path.suffix for path in fetch_part(uri, outcome, "state").iterdir()} == {".json", ".safetensors"}


def test_policy_and_reference_compute_the_configured_attention(uri, policy):
    asked = start_worker(uri, change(CONFIG, attention="eager"))
    outcome, plain = (worker.update(update_work(uri, policy)) for worker in (asked, start_worker(uri)))
    models = (asked._models.policy.trainer._model, asked._models._reference._loaded[1]._module.model)
    assert [model.config._attn_implementation for model in models] == ["eager_of_shared_prompts"] * 2
    assert outcome.model.weights != plain.model.weights
    assert outcome.metrics["loss"] == pytest.approx(plain.metrics["loss"], abs=1e-5)


def test_an_update_without_samples_does_not_change_the_policy(uri, policy):
    outcome = update_once(uri, policy, prompts=0)
    assert outcome.model == ModelVersion(version=1, weights=policy.weights, state=None)
    assert outcome.metrics == {"quarantined": 0, "steps": 0, "samples": 0, "kl_coefficient": 0.1}


def test_groups_without_a_trained_token_do_not_change_the_loss(uri, policy):
    lean, filled = (update_once(uri, policy, UNCLIPPED, filling=count) for count in (0, 3))
    for name in ("loss", "kl", "tokens", "grad_norm_max"):
        assert filled.metrics[name] == pytest.approx(lean.metrics[name], rel=1e-5)
    assert filled.metrics["samples"] == lean.metrics["samples"] + 12


def test_minibatches_without_a_trained_token_take_no_step(uri, policy):
    alone = update_once(uri, policy, prompts=0, filling=3)
    assert alone.model == ModelVersion(version=1, weights=policy.weights, state=None)
    one = update_once(uri, policy, prompts=1, filling=1)  # two minibatches, of which one has no token
    assert one.metrics["steps"] == 1


def test_tokens_that_are_too_stale_cause_no_step_and_change_no_count(uri, policy):
    config, work = change(UNCLIPPED, max_staleness=0), update_work(uri, policy, prompts=2)
    rows = read_rows(uri, work)
    for row in rows[1:]:
        row["staleness"] = [1] * len(row["staleness"])
    mixed = start_worker(uri, config).update(with_rows(uri, work, rows))
    tokens = sum(len(row["logprobs"]) for row in rows)
    assert mixed.metrics["tokens"] == tokens
    assert mixed.metrics["too_stale_fraction"] == pytest.approx(1 - len(rows[0]["logprobs"]) / tokens)
    alone = start_worker(uri, config).update(with_rows(uri, work, rows[:1]))
    for name in ("entropy", "kl_old", "importance_weight_mean"):
        assert mixed.metrics[name] == pytest.approx(alone.metrics[name], rel=1e-4, abs=1e-6)
    rows[0]["staleness"] = [1] * len(rows[0]["staleness"])
    unmoved = start_worker(uri, config).update(with_rows(uri, work, rows))
    assert unmoved.model == ModelVersion(version=1, weights=policy.weights, state=None)


def test_every_fresh_token_is_compared_with_its_rollout_before_the_first_step(uri, policy):
    work = update_work(uri, policy, stalest=1)
    fresh = sum(age == 0 for row in read_rows(uri, work) for age in row["staleness"])
    many, once = (start_worker(uri, config).update(work).metrics for config in (CONFIG, UNCLIPPED))
    assert many["mismatch_tokens"] == once["mismatch_tokens"] == fresh
    assert many["mismatch_difference_mean"] == pytest.approx(once["mismatch_difference_mean"], rel=1e-5)
    assert 0 < many["mismatch_difference_mean"] < many["mismatch_difference_max"]


def completion_logprobs(uri, version, rows) -> list[torch.Tensor]:
    """Return the log-probs of the completion tokens of each row, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(fetch_bundle(open_store(f"{uri}/run"), version.weights))
    found = []
    for row in rows:
        tokens, prompt = torch.tensor(row["tokens"]), row["num_prompt_tokens"]
        with torch.no_grad():
            logprobs_TV = (model(tokens[None]).logits[0, prompt - 1 : -1] / 0.9).log_softmax(dim=-1)
        found.append(logprobs_TV.gather(1, tokens[prompt:, None])[:, 0])
    return found


@pytest.fixture
def exact(uri, policy):
    """Work on samples whose rollout log-probs are exactly those of the policy."""
    work = update_work(uri, policy)
    rows = read_rows(uri, work)
    for row, logprobs in zip(rows, completion_logprobs(uri, policy, rows), strict=True):
        row["logprobs"] = logprobs.tolist()
    return with_rows(uri, work, rows)


def test_exact_rollout_log_probs_are_not_computed_again_and_lead_to_the_same_policy(uri, policy, exact):
    computed, given = (start_worker(uri).update(replace(exact, exact_behaviour=flag)) for flag in (False, True))
    assert 0 < given.metrics["mismatch_tokens"] < computed.metrics["mismatch_tokens"] == computed.metrics["tokens"]
    assert given.metrics["mismatch_difference_max"] < 1e-5
    before, after, other = (load_trained(uri, model) for model in (policy, computed.model, given.model))
    assert distance(other, after) < 1e-3 * distance(before, after)
    assert given.metrics["loss"] == pytest.approx(computed.metrics["loss"], abs=1e-5)


def test_log_probs_are_computed_again_if_an_earlier_version_generated_a_token(uri, policy):
    work = update_work(uri, policy, stalest=1)
    computed, given = (start_worker(uri).update(replace(work, exact_behaviour=flag)) for flag in (False, True))
    assert (given.model, given.metrics) == (computed.model, computed.metrics)


def test_a_second_epoch_compares_with_the_policy_before_the_first(uri, policy, exact):
    config = change(UNCLIPPED, kl=NoKl())
    work = replace(exact, exact_behaviour=False)
    once, twice = (start_worker(uri, change(config, epochs=epochs)).update(work) for epochs in (1, 2))
    rows = read_rows(uri, work)
    after, before = (torch.cat(completion_logprobs(uri, version, rows)) for version in (once.model, policy))
    ratio_T = (after - before).exp()
    advantages_T = torch.tensor([each for row in rows for each in row["advantages"]])
    clipped_T = ratio_T.clamp(1 - config.loss.clip_low, 1 + config.loss.clip_high)
    second = -float(torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T).mean())
    assert (ratio_T - 1).abs().max() > 0.01
    assert twice.metrics["loss"] == pytest.approx((once.metrics["loss"] + second) / 2, abs=1e-5)
    assert twice.metrics["mismatch_tokens"] == once.metrics["mismatch_tokens"]


@pytest.mark.thorough
def test_epochs_repeat_all_minibatches_and_end_at_the_same_loss_with_exact_rollout_log_probs(uri, exact):
    config = change(CONFIG, epochs=3)
    computed, given = (start_worker(uri, config).update(replace(exact, exact_behaviour=flag)) for flag in (False, True))
    assert computed.metrics["steps"] == given.metrics["steps"] == 6
    assert given.metrics["loss"] == pytest.approx(computed.metrics["loss"], abs=1e-5)
    assert start_worker(uri, config).update(replace(exact, exact_behaviour=False)).model == computed.model


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize(("lora", "poison"), [(None, float("nan")), (None, float("inf")), (LORA, float("nan"))])
def test_an_advantage_that_is_not_finite_changes_neither_the_policy_nor_later_updates(uri, policy, lora, poison):
    worker = start_worker(uri, change(CONFIG, lora=lora))
    first = worker.update(update_work(uri, policy)).model
    spoilt = worker.update(update_work(uri, first, advantages=[poison]))
    assert spoilt.model == replace(first, version=2)
    assert spoilt.metrics["quarantined"] == 1
    after = update_work(uri, spoilt.model)
    assert worker.update(after).model == start_worker(uri, change(CONFIG, lora=lora)).update(after).model


def test_an_update_of_a_model_that_overflows_is_quarantined(uri, tmp_path):
    tokenizer = scratch_tokenizer(TINY, load_problems(DATA, "train", 0))
    model = build_scratch(TINY, tokenizer, seed=0)
    model.model.norm.weight.data.fill_(3e38)
    save_policy(model, tokenizer, tmp_path / "huge")
    weights = publish_bundle(open_store(f"{uri}/run"), tmp_path / "huge", prefix="policies")
    outcome = start_worker(uri).update(update_work(uri, ModelVersion(version=0, weights=weights)))
    assert outcome.metrics["quarantined"] == 1
    assert outcome.model.weights == weights


@pytest.mark.parametrize("lora", [None, LORA])
def test_the_kl_is_zero_at_the_first_step_if_the_policy_is_the_reference(uri, policy, lora):
    worker = start_worker(uri, change(CONFIG, minibatches=1, lora=lora))
    first = worker.update(update_work(uri, policy))
    assert first.metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert worker.update(update_work(uri, first.model, reference=policy)).metrics["kl"] > (1e-5 if lora is None else 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"dtype": "bfloat16"}, "float32 weights, .* bfloat16"), ({"optimizer": Muon()}, "adamw, .* muon")],
)
def test_an_optimizer_state_of_another_precision_or_optimizer_is_refused(uri, policy, settings, message):
    first = update_once(uri, policy).model
    with pytest.raises(BadInput, match=message):
        update_once(uri, first, change(CONFIG, **settings))


def test_progress_counts_micro_batches(uri, policy):
    worker = start_worker(uri)
    worker.update(update_work(uri, policy))
    assert worker.progress() > 4


@pytest.mark.parametrize("aggregation", [CONFIG.loss.aggregation, SequenceMean()], ids=["token", "sequence"])
def test_the_size_of_a_micro_batch_changes_no_gradient(uri, policy, aggregation):
    base = change(UNCLIPPED, loss=change(CONFIG.loss, aggregation=aggregation))
    small, large = (update_once(uri, policy, change(base, microbatch_tokens=size)) for size in (40, 9999))
    assert small.metrics["loss"] == pytest.approx(large.metrics["loss"], abs=1e-6)
    np.testing.assert_allclose(gradients(uri, small), gradients(uri, large), atol=1e-6)


def test_warmup_lowers_the_loss_and_leaves_no_optimizer_state(uri, policy):
    task = WarmupWork(policy=policy, data=DATA, warmup=WarmupConfig(steps=40, batch_size=16), seed=3)
    outcome = start_worker(uri).warmup(task)
    assert outcome.metrics["loss_last"] < 0.8 * outcome.metrics["loss_first"]
    assert (outcome.model.version, outcome.model.state) == (0, None)
    brief = replace(task, warmup=WarmupConfig(steps=5, batch_size=16))
    once, again = (start_worker(uri).warmup(brief).model for _ in range(2))
    assert policy.weights != once.weights
    assert once == again


def test_warmup_drops_the_prompts_that_iterations_drop(uri, policy, tmp_path):
    rows = [json.dumps({"prompt": f"{n} + 1 =", "answer": f"#### {n + 1}"}) for n in range(6)]
    long = json.dumps({"prompt": "7" * 60, "answer": "#### 7"})
    learnt = []
    for name, lines in (("few", rows), ("more", [rows[0], long, *rows[1:], long.replace("7", "8")])):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(lines))
        data = FileData(path=path, heldout_path=path, on_too_long="drop")
        task = WarmupWork(policy, data, WarmupConfig(steps=2, batch_size=8), seed=3, max_new_tokens=216)
        learnt.append(start_worker(uri).warmup(task).model)
    assert learnt[0] == learnt[1] != policy


def test_an_update_after_warmup_starts_as_in_a_new_process(uri, policy):
    worker = start_worker(uri)
    warm = worker.warmup(WarmupWork(policy=policy, data=DATA, warmup=WarmupConfig(steps=3, batch_size=4), seed=3))
    assert worker.update(update_work(uri, warm.model)).model == update_once(uri, warm.model).model
