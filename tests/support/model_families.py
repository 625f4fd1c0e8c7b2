"""Tiny random policies of many families of models, from tests/models/families.toml."""

import tomllib
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.support.policies import small_tokenizer

FAMILIES = tomllib.loads((Path(__file__).parents[1] / "models/families.toml").read_text())
SIZES = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "n_embd", "n_inner", "d_model", "ffn_hidden_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("head_dim", "state_size", "mamba_d_state", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_d_ssm", "sliding_window"), 64),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 512),
    "vocab_size": 400,  # more than the tokenizer has, because transformers adds tokens to it in some families
    "bos_token_id": None,
}
"""Values of a tiny configuration, for the keys that a family has."""


def build_config(family: str, **settings: object) -> PretrainedConfig:
    """Return the tiny configuration of a family, for the tokenizer of small policies. `settings` replace its values."""
    kind, tokenizer = CONFIG_MAPPING[family], small_tokenizer()
    keys, aliases = kind().to_dict(), kind.attribute_map
    sizes = {key: size for key, size in SIZES.items() if key in keys or key in aliases}
    sizes = {key: size for key, size in sizes.items() if aliases.get(key) not in sizes}
    own = {key: value for key, value in FAMILIES[family].items() if key not in ("refused", "context")}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return kind(**sizes | ends | own | settings)


def write_family(family: str, directory: Path, **settings: object) -> None:
    """Write a random policy of a family, with a tokenizer for any text. `settings` replace values of its
    configuration."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(build_config(family, **settings)).float().save_pretrained(directory)
    small_tokenizer().save_pretrained(directory)
