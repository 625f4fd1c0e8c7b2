"""Layers that are computed again in the backward pass teach the same to the bit, and keep less meanwhile."""

import copy

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig, OPTConfig, Qwen3Config

from infra.store.bundles import BundleRef
from models.commands.memory import PassSizes, pass_bytes
from models.config.lora import LoraConfig
from models.config.objectives import UpdateConfig
from models.inspection.directory import DecoderSizes
from models.modeling.adapters import put_adapters
from models.modeling.checkpointing import checkpoint_layers, layers_to_recompute
from models.modeling.layout import lay_out
from models.modeling.logprobs import ForwardInput, TokenLogprobs
from models.records.model_input import ModelInput
from tests.support.recomputing import learnt

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
WINDOWS = ["sliding_attention", "full_attention"] * 2
FAMILIES = {
    "llama": LlamaConfig(**SHAPE),
    "windows": Gemma3TextConfig(**SHAPE, sliding_window=5, layer_types=WINDOWS),
    "gpt2 with dropout": GPT2Config(vocab_size=300, n_embd=32, n_layer=4, n_head=4, n_positions=128),
    "opt with dropout": OPTConfig(
        vocab_size=300, hidden_size=32, ffn_dim=48, num_hidden_layers=4, num_attention_heads=4, word_embed_proj_dim=32
    ),
}


def built(family, *, adapters=False, again=False):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES[family])).eval()
    if adapters:
        put_adapters(model, LoraConfig(rank=4), base=BundleRef(key="policies/base", digest="base", bytes=0))
    if again:
        checkpoint_layers(model)
    return TokenLogprobs(model, temperature=0.9).double()


def batch():
    """Two groups, whose prompts are shared where a model can."""
    rng, inputs = np.random.default_rng(0), []
    for lengths in ((9, 1, 24, 13), (0, 30, 6)):
        prompt = ModelInput.given(rng.integers(2, 300, 17))
        inputs += [prompt.continued(rng.integers(2, 300, length)) for length in lengths]
    return lay_out(inputs)


def given(*, shares):
    return ForwardInput.of(batch(), torch.device("cpu"), shares=shares)


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_layers_that_are_computed_again_are_the_same_bits(family, adapters, shares):
    kept, again = (built(family, adapters=adapters, again=again) for again in (False, True))
    if shares and not kept.shares_prompts:
        pytest.skip("it takes padded passes alone")
    assert len(layers_to_recompute(again.model)) == 4
    (expected_N, gradients, much), (found_N, found, little) = (
        learnt(each, given(shares=shares)) for each in (kept, again)
    )
    assert torch.equal(found_N, expected_N)
    assert any(gradient is not None and gradient.any() for gradient in gradients.values())
    for name, gradient in gradients.items():
        assert (found[name] is None) == (gradient is None), name
        assert gradient is None or torch.equal(found[name], gradient), name
    assert little < 0.6 * much


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_what_a_pass_keeps_is_foretold(architecture, adapters):
    sizes = DecoderSizes(architecture, 300, 256, 768, 4, heads=8, kv_heads=4, head_size=32, context=128)
    shape = SHAPE | {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "head_dim": 32}
    config = {"llama": LlamaConfig, "qwen3": Qwen3Config}[architecture](**shape | {"num_key_value_heads": 4})
    model, lora = AutoModelForCausalLM.from_config(config).eval(), LoraConfig(rank=2) if adapters else None
    if lora is not None:
        put_adapters(model, lora, base=BundleRef(key="policies/base", digest="base", bytes=0))
    prompts, rng = [ModelInput.given([5, 6]), ModelInput.given([6, 5])] * 4, np.random.default_rng(0)
    read = lay_out([prompt.continued(rng.integers(2, 300, 60)) for prompt in sorted(prompts, key=str)])
    *_, held = learnt(TokenLogprobs(model, temperature=0.9), ForwardInput.of(read, torch.device("cpu"), shares=False))
    found = pass_bytes(UpdateConfig(lora=lora), sizes.outline(), PassSizes(read.tokens_BT.size), held=0)
    head = 4 * 300 * len(read.targets_N)  # its log-softmax, which is counted with the head
    assert found["kept_activations_bytes"] == pytest.approx(held - head, rel=0.1)


def test_a_pass_without_gradients_is_the_plain_one():
    module = built("llama", again=True)
    with torch.no_grad():
        said_N = module(ForwardInput.of(batch(), torch.device("cpu"), shares=True))
    assert torch.equal(said_N, learnt(built("llama"), given(shares=True))[0])
