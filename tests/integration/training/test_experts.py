"""Mixtures of experts: engine and update agree, routers learn to balance their load, and updates replay experts."""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from transformers import AutoModelForCausalLM, GptOssConfig, MiniMaxM2Config, Qwen2MoeConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from rheostat.infra.errors import BadInput, Damaged
from rheostat.infra.store.shards import read_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.algorithms import Distillation, DistillationOnly
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.config.lora import LoraConfig
from rheostat.models.config.rollout import PartialRollout
from rheostat.models.config.teachers import TeacherDirectory
from rheostat.models.modeling.experts import record_chosen_experts, routers
from rheostat.models.modeling.layout import lay_out
from rheostat.models.modeling.logprobs import ForwardInput, TokenLogprobs
from rheostat.models.modeling.policy import load_policy
from rheostat.models.modeling.replayed_experts import can_replay
from rheostat.models.records.model_input import ModelInput, rollout_inputs
from rheostat.models.records.schemas import EXPERTS, FinishReason
from rheostat.models.records.versions import ModelVersion
from rheostat.models.records.work import EstimateWork, ScoredShard
from tests.support.engines import MIXED, engine_of, plain_logprobs, publish, publish_adapter
from tests.support.mixtures import KINDS, publish_mixture, replayed_work
from tests.support.policies import ARCHITECTURES, DECODER, write_policy
from tests.support.processes import preload
from tests.support.rollout_workers import example, worker
from tests.support.update_workers import (
    CONFIG,
    UNCLIPPED,
    change,
    gradients,
    start_worker,
    update_once,
    update_work,
)

preload(__name__)


@pytest.fixture(params=KINDS)
def mixture(request, uri: str) -> ModelVersion:
    return publish_mixture(uri, request.param)


def inputs(count: int, *, seed: int) -> list[ModelInput]:
    rng = np.random.default_rng(seed)
    prompt = ModelInput.from_prompt(rng.integers(2, 300, 7))
    return [prompt.append_completion(rng.integers(2, 300, rng.integers(1, 20))) for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_router_losses_of_micro_batches_add_up_to_that_of_transformers_over_all_trained_tokens(kind, tmp_path):
    write_policy(tmp_path, kind)
    model = load_policy(tmp_path)
    plain, module = copy.deepcopy(model), TokenLogprobs(model, temperature=1.0)
    routing = module.routing
    passes = [lay_out(inputs(count, seed=count)) for count in (3, 1, 5)]

    def run(batch, *, shares):
        module(ForwardInput.from_microbatch(batch, torch.device("cpu"), shares=shares))

    logits = []
    for batch in passes:
        said = plain.base_model(input_ids=torch.from_numpy(batch.tokens_BT), output_router_logits=True).router_logits
        at_N = torch.from_numpy(batch.positions_N)
        logits.append([layer.view(-1, layer.shape[-1])[at_N] for layer in said])
    chosen = plain.config.num_experts_per_tok
    layers = [torch.cat(layer) for layer in zip(*logits, strict=True)]
    whole = torch.stack([load_balancing_loss_func((layer,), 6, chosen) for layer in layers]).mean()
    whole.backward()
    for shares in (False, True):
        counts, total = 0, 0.0
        module.zero_grad()
        for batch in passes:
            run(batch, shares=shares)
            counts = counts + routing.counts()
        assert counts.sum() == 3 * chosen * sum(len(batch.targets_N) for batch in passes)
        for batch in passes:
            run(batch, shares=shares)
            share = routing.balance_loss(counts)
            share.backward()
            total += float(share.detach())
        assert total == pytest.approx(float(whole.detach()), rel=1e-5)
        expected = dict(plain.named_parameters())
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-3, atol=1e-6)


@pytest.mark.thorough_after(1)
def test_the_size_of_a_micro_batch_changes_neither_the_router_loss_nor_a_gradient(uri, mixture):
    settings = ({"router_loss": 0.5, "microbatch_tokens": 60}, {"router_loss": 0.5, "microbatch_tokens": 9999}, {})
    small, large, plain = (update_once(uri, mixture, change(UNCLIPPED, **each)) for each in settings)
    assert small.metrics == pytest.approx(large.metrics, rel=1e-4, abs=1e-6)
    np.testing.assert_allclose(gradients(uri, small), gradients(uri, large), atol=2e-6)
    assert plain.metrics["router_load_max"] == pytest.approx(large.metrics["router_load_max"])
    assert "router_loss" not in plain.metrics
    assert np.abs(gradients(uri, plain) - gradients(uri, large)).max() > 1e-4


@pytest.mark.thorough
def test_updates_balance_the_load_of_the_experts(uri):
    policy = publish_mixture(uri)
    config = change(CONFIG, router_loss=10.0)
    worker, version, found = start_worker(uri, config), policy, []
    for _ in range(8):
        outcome = worker.update(update_work(uri, version, seed=1))
        found.append(outcome.metrics)
        version = outcome.model
    assert found[0]["router_loss"] > 2
    assert found[-1]["router_loss"] - 2 < 0.5 * (found[0]["router_loss"] - 2)  # 2 where all are used alike


def test_updates_of_dense_policies_have_no_router_metrics(uri, policy):
    assert not [name for name in update_once(uri, policy).metrics if "router" in name]


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_serves_the_adapters_of_a_mixture_of_experts_as_peft_computes_them(kind, tmp_path):
    base = publish(tmp_path, kind)
    adapted = publish_adapter(tmp_path, base)
    engine = engine_of(base.directory, max_batch_rows=8)
    engine.load(base.directory, adapted.version, adapter=adapted.adapter)
    groups = engine.generate(MIXED, SamplingConfig(max_new_tokens=8))
    peft = pytest.importorskip("peft")
    plain = peft.PeftModel.from_pretrained(load_policy(base.directory), adapted.adapter).eval()
    for asked, group in zip(MIXED, groups, strict=True):
        for given, completion in zip(asked.inputs, group, strict=True):
            expected = plain_logprobs(plain, given, completion.tokens, 1.0)
            assert completion.logprobs == pytest.approx(expected, abs=1e-4)


# ---- replay: the update uses the experts that the rollout recorded


CPU = torch.device("cpu")

SIZES = {**DECODER, "num_hidden_layers": 2}

FAMILIES = {
    "mixtral": ARCHITECTURES["mixtral"],
    "qwen3_moe": ARCHITECTURES["qwen3_moe"],
    "qwen2_moe": (
        Qwen2MoeConfig,
        {**SIZES, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "initializer_range": 0.1},
    ),
    "gpt_oss": (GptOssConfig, {**SIZES, "num_local_experts": 6, "num_experts_per_tok": 2, "initializer_range": 0.1}),
    "minimax_m2": (MiniMaxM2Config, {**SIZES, "num_local_experts": 6, "num_experts_per_tok": 2}),
}


@pytest.fixture(params=FAMILIES)
def kind(request, monkeypatch) -> str:
    monkeypatch.setitem(ARCHITECTURES, request.param, FAMILIES[request.param])
    return request.param


def change_routers(model: torch.nn.Module) -> torch.nn.Module:
    """Change a model's weights so that its routers choose other experts."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for router in routers(model):
            router.weight.copy_(torch.randn(router.weight.shape, generator=generator) * 0.3)
    return model


def roll_out(directory: Path) -> list[tuple[ModelInput, tuple[float, ...]]]:
    """Sample completions and record the experts. Return the inputs of models and the log-probs of each completion."""
    engine = engine_of(directory)
    engine.record_experts(True)
    groups = engine.generate(MIXED, SamplingConfig(max_new_tokens=24, temperature=0.8))
    return [
        (given.append_completion(completion.tokens).with_experts(completion.experts), completion.logprobs)
        for asked, group in zip(MIXED, groups, strict=True)
        for given, completion in zip(asked.inputs, group, strict=True)
    ]


def choose_experts(module: TokenLogprobs, inputs: list[ModelInput]) -> list[np.ndarray]:
    """Return the experts that routers choose in a padded forward pass, for all tokens of each input except the last."""
    module.shares_prompts = False
    batch = lay_out(inputs)
    with torch.no_grad(), record_chosen_experts(module.model) as choices:
        module(module.prepare_inputs(batch, CPU))
    chosen_BTF = choices.pop_choices().reshape(*batch.tokens_BT.shape, -1)
    return [chosen_TF[: len(each) - 1] for chosen_TF, each in zip(chosen_BTF, inputs, strict=True)]


@pytest.mark.thorough_after(1)
def test_the_trainer_chooses_the_experts_of_the_rollout_and_computes_its_log_probs(kind, tmp_path):
    write_policy(tmp_path, kind)
    pairs = roll_out(tmp_path)
    inputs, noted = [each for each, _ in pairs], [each.experts for each, _ in pairs]
    expected = pytest.approx([each for _, logprobs in pairs for each in logprobs], abs=1e-5)
    for replays in (False, True):
        module = TokenLogprobs(load_policy(tmp_path), temperature=0.8, replays_experts=replays)
        with torch.no_grad():
            assert module(module.prepare_inputs(lay_out(inputs), CPU)).tolist() == expected
    alone = choose_experts(TokenLogprobs(load_policy(tmp_path), temperature=0.8), inputs)
    assert all(np.array_equal(*both) for both in zip(alone, noted, strict=True))
    assert len(np.unique(np.concatenate(noted), axis=0)) > 2


def force_experts(model: torch.nn.Module, chosen_LF: torch.Tensor) -> None:
    """Replace the routers by ones that choose these experts, with each family's formula implemented a second time."""
    top = routers(model)[0].top_k

    def forward(router, states, *bias, number):
        states = states.reshape(-1, states.shape[-1])
        logits_LE = F.linear(states, router.weight, getattr(router, "bias", None))
        chosen_LK = chosen_LF[:, number * top : (number + 1) * top].long()
        match type(router).__name__:
            case "MixtralTopKRouter":
                weights = torch.gather(logits_LE.float().exp() / logits_LE.float().exp().sum(-1, True), 1, chosen_LK)
                weights = weights / weights.sum(-1, True)
            case "Qwen3MoeTopKRouter" | "Qwen2MoeTopKRouter":  # whose configuration here does not normalise
                assert not router.norm_topk_prob
                weights = logits_LE.float().exp() / logits_LE.float().exp().sum(-1, True)
                weights = torch.gather(weights, 1, chosen_LK).to(logits_LE.dtype)
            case "GptOssTopKRouter":
                weights = torch.gather(logits_LE, 1, chosen_LK).exp()
                weights = weights / weights.sum(-1, True)
            case "MiniMaxM2TopKRouter":
                weights = torch.gather(1 / (1 + (-logits_LE.float()).exp()), 1, chosen_LK)
                weights = weights / weights.sum(-1, True)
        return logits_LE, weights, chosen_LK

    for number, router in enumerate(routers(model)):
        router.forward = lambda *read, number=number, router=router: forward(router, *read, number=number)


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("shares", [False, True])
def test_replay_computes_outputs_and_gradients_through_the_recorded_experts(kind, shares, tmp_path):
    """In float64, except for what families always compute in float32: states and every gradient.

    The plain model has no interception, no sharing, and one row per forward pass.
    """
    write_policy(tmp_path, kind)
    inputs = [each for each, _ in roll_out(tmp_path)][2:9]
    model, plain = (
        change_routers(AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager").double())
        for _ in range(2)
    )
    module = TokenLogprobs(model, temperature=1.0, replays_experts=True)
    module.shares_prompts &= shares
    read = module.prepare_inputs(lay_out(inputs), CPU)
    assert (read.shared is not None) == module.shares_prompts
    module.replay.set_choices(read.chosen_LF)
    states_NH = module.states(read)
    signs_H = torch.randn(states_NH.shape[1], generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (states_NH.tanh() @ signs_H).sum().backward()
    expected = []
    for each in inputs:
        force_experts(plain, torch.from_numpy(np.pad(each.experts.astype(np.int64), ((0, 1), (0, 0)))))
        said_TH = plain.base_model(torch.from_numpy(each.tokens[None].astype(np.int64)), use_cache=False)[0][0]
        expected.append(said_TH[each.trained_positions - 1])
    expected_NH = torch.cat(expected)
    (expected_NH.tanh() @ signs_H).sum().backward()
    torch.testing.assert_close(states_NH, expected_NH, rtol=1e-5, atol=1e-6)
    others = dict(plain.named_parameters())
    for name, parameter in model.base_model.named_parameters(prefix=model.base_model_prefix):
        torch.testing.assert_close(parameter.grad, others[name].grad, rtol=1e-4, atol=1e-5)
    alone = choose_experts(TokenLogprobs(change_routers(load_policy(tmp_path)), temperature=1.0), inputs)
    assert any((own != each.experts).any() for own, each in zip(alone, inputs, strict=True))


# ---- whole updates

REPLAYING = change(UNCLIPPED, router_replay="rollout", router_loss=0.5)
SMALL = change(REPLAYING, microbatch_tokens=60)


@pytest.mark.thorough
def test_neither_micro_batch_size_nor_recomputing_layers_changes_the_gradients_of_a_replay(uri):
    work = replayed_work(uri, publish_mixture(uri))
    small, large, again, chosen = (
        start_worker(uri, config).update(work)
        for config in (
            SMALL,
            change(REPLAYING, microbatch_tokens=9999),
            change(SMALL, activation_checkpointing=True),
            change(UNCLIPPED, router_loss=0.5),
        )
    )
    assert small.metrics == pytest.approx(large.metrics, rel=1e-4, abs=1e-6)
    np.testing.assert_allclose(gradients(uri, small), gradients(uri, large), atol=2e-6)
    assert again.model.weights == small.model.weights
    assert np.abs(gradients(uri, chosen) - gradients(uri, large)).max() > 1e-4


@pytest.mark.thorough
def test_the_reference_routes_without_replay_as_a_second_model_and_as_the_base_of_adapters(uri):
    work = replayed_work(uri, publish_mixture(uri))
    whole, adapted = (
        start_worker(uri, change(REPLAYING, lora=lora)).update(work).metrics for lora in (None, LoraConfig())
    )
    assert whole["kl"] > 1e-6  # policy and reference have the same weights and differ in the replayed experts alone
    assert adapted["kl"] == pytest.approx(whole["kl"], rel=1e-2)


@pytest.mark.parametrize(("top", "found"), [(1, "has 3"), (0, "has none")])
def test_samples_without_the_experts_of_the_policys_routers_are_damaged(uri, top, found):
    policy = publish_mixture(uri)
    work = replayed_work(uri, policy, top=top) if top else update_work(uri, policy)
    with pytest.raises(
        Damaged, match=rf"sample with \d+ tokens.* 6 experts with numbers below 6, but the sample {found}"
    ):
        start_worker(uri, SMALL).update(work)


# ---- rollouts that are cut, and taken up by others


@pytest.mark.parametrize("kind", ["mixtral"], indirect=True)
def test_a_continued_completion_keeps_the_recorded_experts_of_its_first_tokens(kind, tmp_path):
    store = open_store(str(tmp_path / "run"))
    asked = replace(
        example(store, tmp_path / "dense"), policy=publish_mixture(str(tmp_path), kind), records_experts=True
    )
    whole = worker(tmp_path).generate(asked)
    table = read_shard(store, whole.shards[0])
    expected = {(row["prompt_row"], row["sample"]): row for row in table.to_pylist()}
    assert all(len(each.experts) == len(each) - 1 for each in rollout_inputs(table))
    cut = worker(tmp_path).generate(replace(asked, partial=PartialRollout(tokens=6)))  # whose worker then is gone
    begun = read_shard(store, cut.shards[1])
    assert FinishReason.CUT in begun["finish_reason"].to_pylist()
    on = replace(asked, iteration=4, rows=(), continued=cut.shards[1])
    for policy, same in ((asked.policy, True), (publish_mixture(str(tmp_path), seed=7), False)):
        [ended] = worker(tmp_path).generate(replace(on, policy=replace(policy, version=1))).shards
        rows = read_shard(store, ended).to_pylist()
        assert len(rows) == begun.num_rows
        for row, before in zip(rows, begun.to_pylist(), strict=True):
            assert row[EXPERTS][: len(before[EXPERTS])] == before[EXPERTS]
            assert len(row[EXPERTS]) == len(row["prompt_tokens"]) + len(row["completion_tokens"]) - 1
            if same:
                assert row[EXPERTS] == expected[row["prompt_row"], row["sample"]][EXPERTS]


def test_recording_the_experts_of_a_dense_policy_is_refused(tmp_path):
    asked = replace(example(open_store(str(tmp_path / "run")), tmp_path / "dense"), records_experts=True)
    with pytest.raises(BadInput, match="no experts whose choice could be recorded"):
        worker(tmp_path).generate(asked)


@pytest.mark.parametrize(("name", "fits"), [("mixtral", True), ("phimoe", False)])
def test_model_families_whose_routers_cannot_replay_are_recognized(name, fits):
    from transformers import CONFIG_MAPPING

    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**sizes, num_key_value_heads=2))
    assert routers(model)
    assert can_replay(model) == fits


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("kind", ["mixtral"], indirect=True)
def test_estimates_replay_the_experts_for_the_policy_and_not_for_its_teacher(kind, tmp_path):
    """Teacher and policy have the same weights: first those that generated the rollouts, then others."""
    store = open_store(str(tmp_path / "run"))
    wrote = publish_mixture(str(tmp_path), kind)
    asked = replace(example(store, tmp_path / "dense"), policy=wrote, records_experts=True)
    [rollouts] = worker(tmp_path).generate(asked).shards
    algorithm = DistillationOnly(distillation=Distillation(teacher=TeacherDirectory(path=tmp_path)))
    learner = start_worker(str(tmp_path), SMALL, algorithm=algorithm, temperature=1.0)
    shards, found = (ScoredShard(rollouts, rollouts),), []
    for version in (wrote, publish_mixture(str(tmp_path), seed=7)):
        made = learner.estimate(EstimateWork(iteration=1, shards=shards, policy=version, teacher=version))
        said = read_shard(store, made.shards[0])
        found.append([np.concatenate(said[name].to_pylist()) for name in ("policy", "teacher")])
    sampled = np.concatenate(read_shard(store, rollouts)["logprobs"].to_pylist())
    for said in found[0]:
        np.testing.assert_allclose(said, sampled, atol=1e-5)
    assert np.abs(found[1][0] - found[1][1]).max() > 1e-4
