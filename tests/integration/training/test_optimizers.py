"""Optimizers: their steps compared with plain arithmetic, and their states in other layouts."""

from math import ceil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.optimizers import Adam8bit, Muon
from rheostat.models.data.problems import load_problems
from rheostat.models.modeling.logprobs import TokenLogprobs
from rheostat.models.modeling.policy import build_scratch
from rheostat.models.text.tokenizer import scratch_tokenizer
from rheostat.models.training.layouts import StateLayout, convert_state
from rheostat.models.training.optimizers import adam8bit, adamw, hidden_matrices, muon
from tests.support.training import DATA, TINY
from tests.support.update_workers import CONFIG, change, update_once

MUON = change(CONFIG, optimizer=Muon())
EIGHT = change(CONFIG, optimizer=Adam8bit())


def module() -> TokenLogprobs:
    tokenizer = scratch_tokenizer(TINY, load_problems(DATA, "train", 0))
    return TokenLogprobs(build_scratch(TINY, tokenizer, seed=0), temperature=1.0)


def take_steps(make, config: UpdateConfig, *, steps: int = 3) -> tuple[TokenLogprobs, list[dict[str, torch.Tensor]]]:
    """Return a module after steps along random gradients, and the gradients by name."""
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


def orthogonalize(matrix: np.ndarray) -> np.ndarray:
    """Orthogonalize by five quintic Newton-Schulz iterations in float64 (Jordan et al., 2024)."""
    x = matrix / np.linalg.norm(matrix)
    tall = len(x) > x.shape[1]
    x = x.T if tall else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if tall else x


def test_muon_orthogonalizes_the_momentum_of_matrices_and_adamw_steps_the_rest():
    config = change(MUON, weight_decay=0.1)
    before, (found, gradients) = module(), take_steps(muon, config)
    plain, _ = take_steps(adamw, config)
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
            update = orthogonalize(0.05 * gradient + 0.95 * momentum)
            size = 0.2 * np.sqrt(max(weight.shape))
            weight = weight * (1 - config.learning_rate * 0.1) - config.learning_rate * size * update
        apart = np.linalg.norm(parameter.detach().numpy() - weight) / np.linalg.norm(weight - begin)
        assert apart < 0.02, (name, apart)  # torch iterates in bfloat16


def test_8_bit_moments_give_nearly_the_weights_of_float32_moments():
    (found, _), (plain, _) = (take_steps(make, EIGHT, steps=20) for make in (adam8bit, adamw))
    begin = dict(module().named_parameters())
    reached = dict(plain.named_parameters())
    for name, parameter in found.named_parameters():
        moved = (reached[name] - begin[name]).detach().norm()
        apart = float((parameter - reached[name]).detach().norm() / moved)
        assert apart < (0.05 if parameter.numel() >= 4096 else 1e-4), (name, apart)  # smaller ones stay in float32


def test_an_8_bit_optimizer_state_is_a_third_of_a_float32_state(uri, policy):
    plain, eight = (update_once(uri, policy, change(config, zero_stage=1)).model.state for config in (CONFIG, EIGHT))
    assert eight.bytes < plain.bytes / 3


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_a_state_resharded_to_other_ranks_and_back_has_the_same_bits(ranks, stage, tmp_path):
    sizes, vectors = [7, 15, 1, 12], ("exp_avg", "exp_avg_sq", "master")
    one, there = (
        StateLayout(world_size=1, zero_stage=0, dtype="float32"),
        StateLayout(world_size=ranks, zero_stage=stage, dtype="float32"),
    )
    generator = torch.Generator().manual_seed(0)
    state = {
        f"{name}.{index}": torch.rand(size, generator=generator) for name in vectors for index, size in enumerate(sizes)
    }
    state |= {f"step.{index}": torch.tensor(4.0) for index in range(4)}
    save_file(state, tmp_path / "one")
    length = {0: 35, 1: ceil(35 / (2 * ranks)) * 2, 2: ceil(35 / (2 * ranks)) * 2}
    each = length.get(stage, sum(ceil(size / ranks) for size in sizes))
    shapes = [(each - 3,), (3,)]  # as ZeRO-3 cuts what is large
    for rank in range(ranks):
        part = convert_state([tmp_path / "one"], one, there, rank=rank, sizes=sizes, shapes=shapes)
        save_file({name: tensor.contiguous() for name, tensor in part.items()}, tmp_path / str(rank))
    files_there = [tmp_path / str(rank) for rank in range(ranks)]
    back = convert_state(files_there, there, one, rank=0, sizes=sizes, shapes=[(size,) for size in sizes])
    assert set(back) == set(state) and all(torch.equal(back[name], state[name]) for name in state)
