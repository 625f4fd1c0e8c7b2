"""The policy: a decoder built from nothing, and how any policy is loaded, saved and measured."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from infra.errors import BadInput
from models.config.policy import ModelShape, ScratchPolicy
from models.modeling.weights import load_weights, making_models


def scratch_config(policy: ScratchPolicy, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    """Describe the decoder."""
    kinds: dict[str, type[PretrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
    return kinds[policy.architecture](
        vocab_size=len(tokenizer),
        hidden_size=policy.hidden_size,
        intermediate_size=policy.intermediate_size,
        num_hidden_layers=policy.layers,
        num_attention_heads=policy.heads,
        num_key_value_heads=policy.kv_heads,
        head_dim=policy.hidden_size // policy.heads,
        max_position_embeddings=policy.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def build_scratch(policy: ScratchPolicy, tokenizer: PreTrainedTokenizerFast, *, seed: int) -> PreTrainedModel:
    """Initialise the decoder at random from the seed; the caller's random state stays as it was."""
    with making_models():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(scratch_config(policy, tokenizer))


def save_policy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write a directory that any user of transformers or vLLM can load."""
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def load_policy(directory: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load weights, for training in float32; on the `meta` device only their names and shapes."""
    return load_weights(AutoModelForCausalLM, directory, what="policy", device=device, dtype=dtype)


def policy_shape(config: PretrainedConfig, *, parameters: int, source: str) -> ModelShape:
    """Read from its configuration what decides memory and length."""
    text = config.get_text_config()
    context = getattr(text, "max_position_embeddings", None)
    if not isinstance(context, int):
        raise BadInput(f"policy {source}: config.json has no max_position_embeddings: its context is unknown")
    heads = text.num_attention_heads
    return ModelShape(
        parameters=parameters,
        context=context,
        layers=text.num_hidden_layers,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
    )
