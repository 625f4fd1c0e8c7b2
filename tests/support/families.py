"""Small random decoders of many families, a micro-batch with shared prompts, and its log-probs and gradients."""

import copy

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rheostat.infra.store.bundles import BundleRef
from rheostat.models.config.lora import LoraConfig
from rheostat.models.modeling.adapters import add_adapters
from rheostat.models.modeling.layout import lay_out
from rheostat.models.modeling.logprobs import ForwardInput
from rheostat.models.records.model_input import ModelInput

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": LlamaConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE),
    "mixture": Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "gemma": GemmaConfig(**SHAPE),
    "gemma2": Gemma2Config(**SHAPE, sliding_window=5),
    "window": MistralConfig(**SHAPE, sliding_window=7),
    "windows and whole": Gemma3TextConfig(
        **SHAPE, sliding_window=5, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "sinks": GptOssConfig(
        **SHAPE,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "olmo2": Olmo2Config(**SHAPE),
    "phi3": Phi3Config(**SHAPE),
    "gpt2": GPT2Config(vocab_size=300, n_embd=32, n_layer=3, n_head=4, n_positions=128),
}


def build(config):
    """Build a model with the same random weights in each call."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()


def add_test_adapters(model, *, rank=4):
    """Put LoRA adapters into a model that has no stored base."""
    add_adapters(model, LoraConfig(rank=rank), base=BundleRef(key="policies/base", digest="0" * 64, bytes=0))


def batch():
    """Lay out groups of four, three and one sequences; one completion is empty and one has a single token."""
    rng = np.random.default_rng(0)
    inputs = []
    for lengths in ((9, 1, 24, 13), (0, 30, 6), (11,)):
        prompt = ModelInput.from_prompt(rng.integers(2, 300, 17))
        inputs += [prompt.append_completion(rng.integers(2, 300, length)) for length in lengths]
    return lay_out(inputs)


def compute_results(module, read, *, shares, device="cpu"):
    """Return the log-probs of a micro-batch and the gradients of a weighted sum of the log-probs."""
    module.zero_grad()
    found_N = module(ForwardInput.from_microbatch(read, torch.device(device), shares=shares))
    (found_N * torch.linspace(-1, 1, len(found_N), device=device)).sum().backward()
    gradients = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    return found_N.detach(), gradients


def assert_same_results(found, expected):
    """Compare log-probs and gradients of two calls of `compute_results`."""
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=2e-6)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=2e-6 * float(gradient.abs().max() + 1))
