"""Decoders of public shapes with random weights, and a tokenizer in which every token ID has a text."""

from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from rheostat.models.modeling.policy import save_policy
from rheostat.models.text.tokenizer import EOS, PAD

DType = Literal["float32", "bfloat16"]
BYTES: dict[DType, int] = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Decoder:
    """Sizes of a decoder-only model with the architecture of Qwen3 and with tied embeddings."""

    name: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocabulary: int
    context: int

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def matmul_parameters(self) -> int:
        """Number of weights in the matrix multiplications of each token: projections, MLP and output head.

        Looking up embeddings needs no multiplication.
        """
        attention = 2 * self.hidden_size * self.head_dim * (self.heads + self.kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        return self.layers * (attention + mlp) + self.vocabulary * self.hidden_size

    @property
    def parameters(self) -> int:
        """Total number of weights of the model: those of matrix multiplications, and those of the norms."""
        norms = self.layers * 2 * (self.hidden_size + self.head_dim) + self.hidden_size
        return self.matmul_parameters + norms

    @property
    def kv_values_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim


QWEN3_0_6B = Decoder(
    name="Qwen3-0.6B-shaped",
    hidden_size=1024,
    layers=28,
    heads=16,
    kv_heads=8,
    head_dim=128,
    intermediate_size=3072,
    vocabulary=151_936,
    context=4096,
)
QWEN3_1_7B = Decoder(
    name="Qwen3-1.7B-shaped",
    hidden_size=2048,
    layers=28,
    heads=16,
    kv_heads=8,
    head_dim=128,
    intermediate_size=6144,
    vocabulary=151_936,
    context=4096,
)
MIDDLE = Decoder(
    name="64M",
    hidden_size=640,
    layers=12,
    heads=10,
    kv_heads=5,
    head_dim=64,
    intermediate_size=1920,
    vocabulary=8192,
    context=256,
)
TINY = Decoder(
    name="tiny",
    hidden_size=32,
    layers=2,
    heads=1,
    kv_heads=1,
    head_dim=32,
    intermediate_size=96,
    vocabulary=1024,
    context=256,
)


def write_decoder(directory: Path, decoder: Decoder, *, dtype: DType, seed: int = 0) -> None:
    """Write a model with random weights and a tokenizer to a directory in Hugging Face format."""
    tokenizer = spelling_tokenizer(decoder.vocabulary, context=decoder.context)
    config = Qwen3Config(
        vocab_size=decoder.vocabulary,
        hidden_size=decoder.hidden_size,
        intermediate_size=decoder.intermediate_size,
        num_hidden_layers=decoder.layers,
        num_attention_heads=decoder.heads,
        num_key_value_heads=decoder.kv_heads,
        head_dim=decoder.head_dim,
        max_position_embeddings=decoder.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    save_policy(model, tokenizer, directory)


def spelling_tokenizer(vocabulary: int, *, context: int) -> PreTrainedTokenizerFast:
    """Build a byte-level BPE tokenizer of exactly `vocabulary` tokens: all bytes, then pairs and triples of bytes.

    Random policies can generate any token, so every token ID needs a text. `context` is the maximum length in tokens.
    Real tokenizers are not available without a network.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = list(product(letters, letters))
    triples = (((first + second), third) for (first, second), third in product(pairs, letters))
    room = vocabulary - 2 - len(letters)
    merges = [*pairs[:room], *islice(triples, max(0, room - len(pairs)))]
    tokens = [PAD, EOS, *letters, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={text: token for token, text in enumerate(tokens)}, merges=merges))
    tokenizer.add_special_tokens([PAD, EOS])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        model_max_length=context,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
