"""Ranks that read a pass together, each a slice of it, learn what one rank does that reads all of it."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from models.config.lora import LoraConfig
from models.config.objectives import UpdateConfig
from models.config.optimizers import Muon
from models.modeling import head
from models.modeling.critic import TokenValues
from models.modeling.layout import MicroBatch, lay_out
from models.modeling.logprobs import TokenLogprobs, TokenModule
from models.records.model_input import ModelInput
from models.records.versions import ModelVersion, Outcome
from models.training.ranks import join_ranks
from tests.support import families
from tests.support.families import FAMILIES, build
from tests.support.processes import preload
from tests.support.update_workers import (
    UNCLIPPED,
    files,
    gradients,
    read,
    same_after_restart,
    start,
    together,
    work,
)

preload(__name__)

SLICED = ("llama", "qwen3", "gemma2", "gpt2", "mixture", "windows and whole")


def passes() -> list[MicroBatch]:
    """Prompts that are shared; one row of odd length, which no padded pass would have shared; a pass of nothing."""
    prompt = ModelInput.given(np.random.default_rng(1).integers(2, 300, 5))
    return [
        families.batch(),
        lay_out([prompt.continued(np.random.default_rng(2).integers(2, 300, 40))]),
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


def learnt(module: TokenModule, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    module.zero_grad()
    found_N = module(module.read(batch, torch.device("cpu")))
    (found_N * torch.linspace(-1, 1, len(found_N))).sum().backward()
    return found_N.detach(), {name: each.grad for name, each in module.named_parameters() if each.grad is not None}


def slice_each(rank: int, ranks: int, port: int, uri: str) -> None:
    """Compare at double precision what the ranks say and learn together with what this one does alone."""
    torch.set_num_threads(1)
    slicing = join_ranks(rank, ranks, address="127.0.0.1", port=port, slices=2).slicing
    built = modules()
    for name in ("float32", "float"):  # what models cast to for norms, positions, softmax and logits
        setattr(torch, name, torch.float64)
    torch.Tensor.float = torch.Tensor.double
    for name, module in built.items():
        module.slice_rows(slicing)
        in_slices = [learnt(module, each) for each in passes()]
        module.slicing = None
        for (found_N, found), again in zip(in_slices, passes(), strict=True):
            expected_N, expected = learnt(module, again)
            torch.testing.assert_close(found_N, expected_N, rtol=0, atol=1e-11, msg=name)
            assert found.keys() == expected.keys(), name
            for weight, gradient in expected.items():
                dist.all_reduce(found[weight])
                atol = 1e-11 * float(gradient.abs().max() + 1)
                torch.testing.assert_close(found[weight], gradient, rtol=0, atol=atol, msg=f"{name}: {weight}")


def test_slices_of_two_ranks_say_and_teach_what_the_whole_row_does_at_double_precision(tmp_path):
    together(slice_each, str(tmp_path))


def sliced(*, slices: int = 2, **changes: object) -> UpdateConfig:
    return UNCLIPPED.model_copy(update={"sequence_parallel": slices, **changes})


def take_each(
    rank: int,
    ranks: int,
    port: int,
    uri: str,
    policy: ModelVersion,
    configs: list[UpdateConfig],
    logits: int | None = None,
) -> None:
    """Update the same policy under one configuration after another; rank 0 notes the outcomes. Slices have no more
    `logits` at a time, where they are given."""
    found, whole = [], head.elements_on
    for config in configs:
        head.elements_on = whole if logits is None or config.sequence_parallel == 1 else lambda device: logits
        worker = start(uri, config, rank=rank, ranks=ranks, port=port)
        found.append(worker.update(work(uri, policy)))
        worker.close()
    torch.save(found, Path(uri, f"each-{rank}.pt"))


def moments(uri: str, outcome: Outcome, ranks: int) -> list[dict[str, torch.Tensor]]:
    return [load_file(files(uri, outcome, "state") / f"rank-{rank:05d}.safetensors") for rank in range(ranks)]


@pytest.mark.system
@pytest.mark.parametrize("ranks", [2, 4])
def test_an_update_in_slices_learns_what_one_without_does_at_every_stage(uri, policy, ranks):
    kinds: list[dict[str, object]] = [{"zero_stage": stage} for stage in range(4)] + [{"optimizer": Muon()}]
    configs = [sliced(**kind, slices=slices) for kind in kinds for slices in (1, 2)]
    together(take_each, uri, policy, configs, 5 * 354, ranks=ranks)
    found = read(uri, "each")
    alone = start(uri, UNCLIPPED.model_copy(update={"microbatch_tokens": 9999})).update(work(uri, policy))
    np.testing.assert_allclose(gradients(uri, found[1]), gradients(uri, alone), atol=1e-6)
    for apart, shared in zip(found[0::2], found[1::2], strict=True):
        assert shared.metrics == pytest.approx(alone.metrics, rel=1e-4, abs=1e-6)
        for whole, cut in zip(moments(uri, apart, ranks), moments(uri, shared, ranks), strict=True):
            assert whole.keys() == cut.keys()
            for name in whole:
                if name.startswith(("exp_avg.", "momentum_buffer.")):
                    torch.testing.assert_close(cut[name], whole[name], rtol=0, atol=1e-7)


@pytest.mark.system
def test_slices_continue_bit_identically_in_new_processes_and_layers_that_are_computed_again_change_no_bit(uri, policy):
    again = {"activation_checkpointing": True}
    adapters = {"lora": LoraConfig(rank=4), "minibatches": 2}
    configs = [
        sliced(),
        sliced(zero_stage=3, minibatches=2),
        sliced(zero_stage=2, **adapters),
        sliced(dtype="bfloat16"),
    ]
    same_after_restart(uri, policy, configs, ranks=2)
    kept = [outcomes[0] for outcomes in read(uri, "hot")[:2]]
    together(take_each, uri, policy, [config.model_copy(update=again) for config in configs[:2]])
    found = read(uri, "each")
    assert [(outcome.model, outcome.metrics) for outcome in found] == [(each.model, each.metrics) for each in kept]
