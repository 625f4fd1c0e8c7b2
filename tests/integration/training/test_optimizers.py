"""Optimizers beside AdamW: their steps beside plain arithmetic, and their states as the store keeps them."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from infra.errors import BadInput
from infra.store.bundles import fetch_bundle
from infra.store.storage import open_store
from models.config.objectives import UpdateConfig
from models.config.optimizers import Adam8bit, Muon
from models.data.problems import load_problems
from models.modeling.logprobs import TokenLogprobs
from models.modeling.policy import build_scratch
from models.text.tokenizer import scratch_tokenizer
from models.training.optimizers import adam8bit, adamw, hidden_matrices, muon
from tests.support.processes import preload
from tests.support.training import DATA, TINY
from tests.support.update_workers import CONFIG, read, same_after_restart, start, take_updates, together, work

preload(__name__)

MUON = CONFIG.model_copy(update={"optimizer": Muon()})
EIGHT = CONFIG.model_copy(update={"optimizer": Adam8bit()})


def module() -> TokenLogprobs:
    tokenizer = scratch_tokenizer(TINY, load_problems(DATA, "train", 0))
    return TokenLogprobs(build_scratch(TINY, tokenizer, seed=0), temperature=1.0)


def stepped(make, config: UpdateConfig, *, steps: int = 3) -> tuple[TokenLogprobs, list[dict[str, torch.Tensor]]]:
    """A module after steps along gradients that are drawn at random; they are returned by name."""
    found, gradients = module(), []
    optimizer, generator = make(found, config, config.optimizer), torch.Generator().manual_seed(3)
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate
    for _ in range(steps):
        for parameter in found.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        gradients.append({name: parameter.grad.clone() for name, parameter in found.named_parameters()})
        optimizer.step()
    return found, gradients


def orthogonalised(matrix: np.ndarray) -> np.ndarray:
    """Five quintic Newton-Schulz iterations, in float64 (Jordan et al., 2024)."""
    x = matrix / np.linalg.norm(matrix)
    tall = len(x) > x.shape[1]
    x = x.T if tall else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if tall else x


def test_muon_orthogonalises_the_momentum_of_matrices_and_leaves_the_rest_to_adamw():
    config = MUON.model_copy(update={"weight_decay": 0.1})
    before, (found, gradients) = module(), stepped(muon, config)
    plain, _ = stepped(adamw, config)
    plain_weights, start_weights = dict(plain.named_parameters()), dict(before.named_parameters())
    hidden = {id(parameter) for parameter in hidden_matrices(found.model)}
    names = [name for name, parameter in found.named_parameters() if id(parameter) in hidden]
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in names} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    for name, parameter in found.named_parameters():
        if name not in names:
            assert torch.equal(parameter, plain_weights[name]), name
            continue
        weight = start_weights[name].detach().double().numpy()
        momentum, begin = np.zeros_like(weight), weight.copy()
        for gradient in (each[name].double().numpy() for each in gradients):
            momentum = 0.95 * momentum + 0.05 * gradient
            update = orthogonalised(0.05 * gradient + 0.95 * momentum)
            size = 0.2 * np.sqrt(max(weight.shape))
            weight = weight * (1 - config.learning_rate * 0.1) - config.learning_rate * size * update
        apart = np.linalg.norm(parameter.detach().numpy() - weight) / np.linalg.norm(weight - begin)
        assert apart < 0.02, (name, apart)  # torch iterates in bfloat16


def test_moments_in_eight_bits_lead_nearly_where_those_in_float32_do():
    (found, _), (plain, _) = (stepped(make, EIGHT, steps=20) for make in (adam8bit, adamw))
    begin = dict(module().named_parameters())
    reached = dict(plain.named_parameters())
    for name, parameter in found.named_parameters():
        moved = (reached[name] - begin[name]).detach().norm()
        apart = float((parameter - reached[name]).detach().norm() / moved)
        assert apart < (0.05 if parameter.numel() >= 4096 else 1e-4), (name, apart)  # smaller ones stay in float32


def test_an_update_by_each_is_the_same_bits_hot_and_reloaded(uri, policy):
    for config in (MUON, EIGHT, EIGHT.model_copy(update={"zero_stage": 2})):
        hot = start(uri, config)
        first = hot.update(work(uri, policy)).model
        again = work(uri, first, reference=policy)
        assert hot.update(again).model == start(uri, config).update(again).model


def test_a_state_in_eight_bits_is_a_third_of_one_in_float32(uri, policy):
    sizes = []
    for config in (CONFIG, EIGHT):
        worker = start(uri, config.model_copy(update={"zero_stage": 1}))
        state = worker.update(work(uri, policy)).model.state
        worker.close()
        sizes.append(state.bytes)
    assert sizes[1] < sizes[0] / 3


def test_a_state_of_another_optimizer_is_refused(uri, policy):
    worker = start(uri)
    first = worker.update(work(uri, policy)).model
    worker.close()
    with pytest.raises(BadInput, match="expected one of muon, found adamw"):
        start(uri, MUON).update(work(uri, first))


@pytest.mark.system
def test_ranks_of_any_number_learn_by_muon_the_same_and_those_in_eight_bits_nearly(uri, policy):
    configs = [MUON, EIGHT, EIGHT.model_copy(update={"zero_stage": 2})]
    same_after_restart(uri, policy, configs, ranks=2)
    together(take_updates, uri, configs, [policy] * 3, "three", ranks=3)
    store = open_store(f"{uri}/run")
    for index, config in enumerate(configs):
        alone = start(uri, config).update(work(uri, policy)).model
        begin, single = (load_file(fetch_bundle(store, each.weights) / "model.safetensors") for each in (policy, alone))
        for name in ("hot", "three"):
            several = load_file(fetch_bundle(store, read(uri, name)[index][0].model.weights) / "model.safetensors")
            apart = sum(float((several[key] - single[key]).norm()) for key in single)
            moved = sum(float((single[key] - begin[key]).norm()) for key in single)
            assert apart < 0.02 * moved, (name, config.optimizer.kind, apart / moved)


@pytest.mark.system
def test_a_state_that_every_rank_holds_whole_goes_on_with_others_while_parts_in_eight_bits_do_not(uri, policy):
    sharded = EIGHT.model_copy(update={"zero_stage": 2})
    together(take_updates, uri, [MUON, sharded], [policy] * 2, "two", ranks=2)
    (whole, _), (parts, _) = read(uri, "two")
    assert start(uri, MUON).update(work(uri, whole.model)).metrics["quarantined"] == 0
    with pytest.raises(BadInput, match="adam8bit continues on as many ranks, at the same ZeRO stage: expected 2 at"):
        start(uri, sharded).update(work(uri, parts.model))
