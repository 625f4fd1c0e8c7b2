"""Sequence-parallel ranks, each with a slice of every micro-batch, have the outputs and gradients of one rank."""

import copy
import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForSequenceClassification

from rheostat.models.modeling.critic import TokenValues
from rheostat.models.modeling.layout import MicroBatch, lay_out
from rheostat.models.modeling.logprobs import TokenLogprobs, TokenModule
from rheostat.models.records.model_input import ModelInput
from rheostat.models.training.ranks import join_ranks
from tests.support import families
from tests.support.families import FAMILIES, build
from tests.support.processes import preload
from tests.support.update_workers import (
    start_ranks,
)

preload(__name__)

SLICED = ("llama", "qwen3", "gemma2", "gpt2", "mixture", "windows and whole")


def passes() -> list[MicroBatch]:
    """Micro-batches with shared prompts, with one row of odd length (which is not padded), and with no rows."""
    prompt = ModelInput.from_prompt(np.random.default_rng(1).integers(2, 300, 5))
    return [
        families.batch(),
        lay_out([prompt.append_completion(np.random.default_rng(2).integers(2, 300, 40))]),
        lay_out([]),
    ]


def modules() -> dict[str, TokenModule]:
    """Policies of several families and a critic, at double precision."""
    found: dict[str, TokenModule] = {}
    for family in SLICED:
        model = build(FAMILIES[family]).double()
        if family == "mixture":
            model.set_experts_implementation("eager")  # grouped products know no double precision
        found[family] = TokenLogprobs(model, temperature=0.8)
    config = copy.deepcopy(FAMILIES["llama"])
    config.num_labels = 1
    torch.manual_seed(0)
    found["critic"] = TokenValues(AutoModelForSequenceClassification.from_config(config).eval().double())
    return found


def compute_gradients(module: TokenModule, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    module.zero_grad()
    found_N = module(module.prepare_inputs(batch, torch.device("cpu")))
    (found_N * torch.linspace(-1, 1, len(found_N))).sum().backward()
    return found_N.detach(), {name: each.grad for name, each in module.named_parameters() if each.grad is not None}


def slice_each(rank: int, ranks: int, port: int, uri: str) -> None:
    """Compare at double precision the outputs and gradients of the ranks together with those of this rank alone."""
    torch.set_num_threads(1)
    sequence_parallel_group = join_ranks(
        rank, ranks, address="127.0.0.1", port=port, sequence_parallel=2
    ).sequence_parallel_group
    assert os.environ["NCCL_SOCKET_IFNAME"] == os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    built = modules()
    for name in ("float32", "float"):  # what models cast to for norms, positions, softmax and logits
        setattr(torch, name, torch.float64)
    torch.Tensor.float = torch.Tensor.double
    for name, module in built.items():
        module.enable_sequence_parallelism(sequence_parallel_group)
        in_slices = [compute_gradients(module, each) for each in passes()]
        module.sequence_parallel_group = None
        for (found_N, found), again in zip(in_slices, passes(), strict=True):
            expected_N, expected = compute_gradients(module, again)
            torch.testing.assert_close(found_N, expected_N, rtol=0, atol=1e-11, msg=name)
            assert found.keys() == expected.keys(), name
            for weight, gradient in expected.items():
                dist.all_reduce(found[weight])
                atol = 1e-11 * float(gradient.abs().max() + 1)
                torch.testing.assert_close(found[weight], gradient, rtol=0, atol=atol, msg=f"{name}: {weight}")


@pytest.mark.system
def test_two_sequence_parallel_ranks_have_the_outputs_and_gradients_of_one_rank_in_float64(tmp_path):
    start_ranks(slice_each, str(tmp_path))
