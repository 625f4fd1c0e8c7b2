"""Activation checkpointing gives bit-identical gradients and keeps fewer activations."""

import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig, OPTConfig, Qwen3Config

from rheostat.models.config.lora import LoraConfig
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.inspection.memory import MicrobatchSizes, microbatch_bytes
from rheostat.models.inspection.plain import DecoderSizes
from rheostat.models.modeling.checkpointing import checkpoint_layers, layers_to_recompute
from rheostat.models.modeling.layout import lay_out
from rheostat.models.modeling.logprobs import ForwardInput, TokenLogprobs
from rheostat.models.records.model_input import ModelInput
from tests.support import families
from tests.support.recomputing import compute_gradients

SHAPE = families.SHAPE | {"num_hidden_layers": 4}
CPU = torch.device("cpu")
FAMILIES = {
    "llama": LlamaConfig(**SHAPE),
    "windows": Gemma3TextConfig(**SHAPE, sliding_window=5, layer_types=["sliding_attention", "full_attention"] * 2),
    "gpt2 with dropout": GPT2Config(vocab_size=300, n_embd=32, n_layer=4, n_head=4, n_positions=128),
    "opt with dropout": OPTConfig(
        vocab_size=300, hidden_size=32, ffn_dim=48, num_hidden_layers=4, num_attention_heads=4, word_embed_proj_dim=32
    ),
}


def build_module(family, *, adapters=False, is_checkpointed=False):
    model = families.build(FAMILIES[family])
    if adapters:
        families.add_test_adapters(model)
    if is_checkpointed:
        checkpoint_layers(model)
    return TokenLogprobs(model, temperature=0.9).double()


def build_input(*, shares):
    return ForwardInput.from_microbatch(families.batch(), CPU, shares=shares)


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_checkpointed_layers_are_bit_identical(family, adapters, shares):
    plain, checkpointed = (
        build_module(family, adapters=adapters, is_checkpointed=is_checkpointed) for is_checkpointed in (False, True)
    )
    if shares and not plain.shares_prompts:
        pytest.skip("this family only supports padded micro-batches")
    assert len(layers_to_recompute(checkpointed.model)) == 4
    expected_N, expected, plain_bytes = compute_gradients(plain, build_input(shares=shares))
    logprobs_N, gradients, checkpointed_bytes = compute_gradients(checkpointed, build_input(shares=shares))
    assert torch.equal(logprobs_N, expected_N)
    assert any(gradient is not None and gradient.any() for gradient in expected.values())
    for name, gradient in expected.items():
        assert (gradients[name] is None) == (gradient is None), name
        assert gradient is None or torch.equal(gradients[name], gradient), name
    assert checkpointed_bytes < 0.6 * plain_bytes


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize(("architecture", "config_class"), [("llama", LlamaConfig), ("qwen3", Qwen3Config)])
def test_the_estimate_of_kept_activations_is_within_ten_percent(architecture, config_class, adapters):
    sizes = DecoderSizes(architecture, 300, 256, 768, 4, heads=8, kv_heads=4, head_size=32, context=128)
    wide = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 4}
    model, lora = families.build(config_class(**SHAPE | wide | {"head_dim": 32})), LoraConfig(rank=2)
    if adapters:
        families.add_test_adapters(model, rank=2)
    prompts, rng = [ModelInput.from_prompt([5, 6])] * 4 + [ModelInput.from_prompt([6, 5])] * 4, np.random.default_rng(0)
    reads = lay_out([prompt.append_completion(rng.integers(2, 300, 60)) for prompt in prompts])
    *_, kept_bytes = compute_gradients(
        TokenLogprobs(model, temperature=0.9), ForwardInput.from_microbatch(reads, CPU, shares=False)
    )
    estimate = microbatch_bytes(
        UpdateConfig(lora=lora if adapters else None), sizes.outline(), MicrobatchSizes(reads.tokens_BT.size), held=0
    )
    head_bytes = 4 * 300 * len(reads.targets_N)  # the log-softmax, which the estimate counts with the head
    assert estimate["kept_activations_bytes"] == pytest.approx(kept_bytes - head_bytes, rel=0.1)


def test_a_forward_pass_without_gradients_gives_the_same_log_probs():
    with torch.no_grad():
        logprobs_N = build_module("llama", is_checkpointed=True)(build_input(shares=True))
    assert torch.equal(logprobs_N, compute_gradients(build_module("llama"), build_input(shares=True))[0])
