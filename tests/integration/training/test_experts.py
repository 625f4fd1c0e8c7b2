"""Mixtures of experts: engine and update agree, and the loss for their routers is of the whole step."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from infra.store.bundles import publish_bundle
from infra.store.storage import open_store
from models.config.engines import SamplingConfig
from models.modeling.layout import lay_out
from models.modeling.logprobs import ForwardInput, TokenLogprobs
from models.modeling.policy import load_policy
from models.records.model_input import ModelInput
from models.records.versions import ModelVersion
from tests.support.engines import MIXED, engine_of, plain_logprobs, publish, publish_adapter
from tests.support.policies import write_policy
from tests.support.processes import preload
from tests.support.update_workers import CONFIG, UNCLIPPED, gradients, read, start, together, work

preload(__name__)

KINDS = ["mixtral", "qwen3_moe"]

EVEN = UNCLIPPED.model_copy(update={"router_loss": 0.5, "microbatch_tokens": 60})


@pytest.fixture(params=KINDS)
def mixture(request, uri: str) -> ModelVersion:
    return published(uri, request.param)


def published(uri: str, kind: str) -> ModelVersion:
    write_policy(Path(uri, kind), kind)
    return ModelVersion(version=0, weights=publish_bundle(open_store(f"{uri}/run"), Path(uri, kind), prefix="policies"))


def inputs(count: int, *, seed: int) -> list[ModelInput]:
    rng = np.random.default_rng(seed)
    prompt = ModelInput.given(rng.integers(2, 300, 7))
    return [prompt.continued(rng.integers(2, 300, rng.integers(1, 20))) for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_engine_and_update_agree_on_what_a_mixture_of_experts_says(kind, tmp_path):
    write_policy(tmp_path, kind)
    groups = engine_of(tmp_path).generate(MIXED, SamplingConfig(max_new_tokens=24, temperature=0.8))
    module = TokenLogprobs(load_policy(tmp_path), temperature=0.8)
    pairs = [
        (given.continued(completion.tokens), completion.logprobs)
        for asked, group in zip(MIXED, groups, strict=True)
        for given, completion in zip(asked.inputs, group, strict=True)
    ]
    assert sum(len(logprobs) for _, logprobs in pairs) > 100
    with torch.no_grad():
        found_N = module(module.read(lay_out([read for read, _ in pairs]), torch.device("cpu")))
    expected = [each for _, logprobs in pairs for each in logprobs]
    assert found_N.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_shares_of_passes_add_up_to_transformers_loss_of_each_layer_over_all_learnt_tokens(kind, tmp_path):
    write_policy(tmp_path, kind)
    model = load_policy(tmp_path)
    plain, module = copy.deepcopy(model), TokenLogprobs(model, temperature=1.0)
    routing = module.routing
    passes = [lay_out(inputs(count, seed=count)) for count in (3, 1, 5)]

    def run(batch, *, shares):
        module(ForwardInput.of(batch, torch.device("cpu"), shares=shares))

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


def test_the_size_of_a_pass_changes_neither_the_routers_loss_nor_a_gradient(uri, mixture):
    config = UNCLIPPED.model_copy(update={"router_loss": 0.5})
    small, large, plain = (
        start(uri, each).update(work(uri, mixture))
        for each in (
            config.model_copy(update={"microbatch_tokens": 60}),
            config.model_copy(update={"microbatch_tokens": 9999}),
            UNCLIPPED,
        )
    )
    assert small.metrics == pytest.approx(large.metrics, rel=1e-4, abs=1e-6)
    np.testing.assert_allclose(gradients(uri, small), gradients(uri, large), atol=2e-6)
    assert plain.metrics["router_load_max"] == pytest.approx(large.metrics["router_load_max"])
    assert "router_loss" not in plain.metrics
    assert np.abs(gradients(uri, plain) - gradients(uri, large)).max() > 1e-4


def test_updates_bring_the_routers_loss_towards_its_least(uri):
    policy = published(uri, "mixtral")
    config = CONFIG.model_copy(update={"router_loss": 10.0, "learning_rate": 1e-3})
    worker, version, found = start(uri, config), policy, []
    for _ in range(8):
        outcome = worker.update(work(uri, version, seed=1))
        found.append(outcome.metrics)
        version = outcome.model
    assert found[0]["router_loss"] > 2
    assert found[-1]["router_loss"] - 2 < 0.5 * (found[0]["router_loss"] - 2)  # 2 where all are used alike


def test_dense_policies_have_no_routers_to_tell_of(uri, policy):
    assert not [name for name in start(uri).update(work(uri, policy)).metrics if "router" in name]


def take_one(rank: int, ranks: int, port: int, uri: str, policy: ModelVersion, slices: int) -> None:
    """Update a policy once, in small passes; rank 0 notes the outcome."""
    config = EVEN.model_copy(update={"sequence_parallel": slices})
    outcome = start(uri, config, rank=rank, ranks=ranks, port=port).update(work(uri, policy))
    torch.save([[outcome]], Path(uri, f"one-{rank}.pt"))


@pytest.mark.system
@pytest.mark.parametrize("slices", [1, 2])
def test_two_ranks_learn_to_use_experts_evenly_as_one_does(uri, slices):
    policy = published(uri, "mixtral")
    together(take_one, uri, policy, slices)
    [[found]] = read(uri, "one")
    alone = start(uri, EVEN.model_copy(update={"microbatch_tokens": 9999})).update(work(uri, policy))
    assert found.metrics == pytest.approx(alone.metrics, rel=1e-4, abs=1e-6)
    np.testing.assert_allclose(gradients(uri, found), gradients(uri, alone), atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_serves_adapters_of_a_mixture_of_experts_as_they_were_trained(kind, tmp_path):
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
