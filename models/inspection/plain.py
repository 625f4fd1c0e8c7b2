"""Plain decoders: sizes and shapes of their weights, and a reader for their directories that needs no modeling code.

A plain directory contains a decoder of a known kind, saved by transformers, with complete weights in the shapes of its
configuration. Only the configuration and the headers of weights are read, and torch is not imported.
"""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedTokenizerFast

from rheostat.infra.errors import BadInput
from rheostat.models.config.outline import ModelOutline
from rheostat.models.config.policy import ModelShape, ScratchPolicy
from rheostat.models.text.tokenizer import load_tokenizer

Shape = tuple[int, ...]

CLASSES: Final = {"llama": "Llama", "qwen3": "Qwen3"}
"""Prefix of transformers' class names for each supported architecture (`model_type`)."""


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """Sizes of a decoder that determine the shapes of its weights."""

    architecture: Literal["llama", "qwen3"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    context: int
    tied: bool = True
    """Whether the output layer shares the weights of the embeddings."""

    @staticmethod
    def from_scratch(policy: ScratchPolicy, *, vocab_size: int) -> "DecoderSizes":
        """Return the sizes of the decoder that is built for a policy with random weights and `vocab_size` tokens."""
        return DecoderSizes(
            architecture=policy.architecture,
            vocab_size=vocab_size,
            hidden_size=policy.hidden_size,
            intermediate_size=policy.intermediate_size,
            layers=policy.layers,
            heads=policy.heads,
            kv_heads=policy.kv_heads,
            head_size=policy.hidden_size // policy.heads,
            context=policy.context,
        )

    def shape(self) -> ModelShape:
        """Return the properties of the decoder that determine its memory use and maximum sequence length."""
        return ModelShape(
            parameters=self.outline().parameters,
            context=self.context,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_size=self.head_size,
        )

    def outline(self) -> ModelOutline:
        """Return the size and structure of the language model, for estimates of training memory."""
        return self._build_outline("ForCausalLM", self.weights())

    def critic(self) -> ModelOutline:
        """Return the size and structure of a critic with the same decoder and a head with one output."""
        trunk = {name: shape for name, shape in self.weights().items() if name != "lm_head.weight"}
        return self._build_outline("ForSequenceClassification", trunk, head=self.hidden_size)

    def weights(self) -> dict[str, Shape]:
        """Return the shapes of the language model's weights by name. Shared weights are listed once."""
        hidden, queries, keys = self.hidden_size, self.heads * self.head_size, self.kv_heads * self.head_size
        block: dict[str, Shape] = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            **(dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (self.head_size,)) if self._norms else {}),
            "mlp.gate_proj": (self.intermediate_size, hidden),
            "mlp.up_proj": (self.intermediate_size, hidden),
            "mlp.down_proj": (hidden, self.intermediate_size),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        blocks = {f"model.layers.{n}.{name}.weight": shape for n in range(self.layers) for name, shape in block.items()}
        head: dict[str, Shape] = {} if self.tied else {"lm_head.weight": (self.vocab_size, hidden)}
        return {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            **blocks,
            "model.norm.weight": (hidden,),
            **head,
        }

    @property
    def _norms(self) -> bool:
        return self.architecture == "qwen3"

    def _build_outline(self, ending: str, weights: dict[str, Shape], *, head: int = 0) -> ModelOutline:
        linear = {n.removesuffix(".weight"): shape for n, shape in weights.items() if n.endswith("_proj.weight")}
        return ModelOutline(
            kind=f"{CLASSES[self.architecture]}{ending}",
            parameters=sum(map(prod, weights.values())) + head,
            layers={name: (inputs, outputs) for name, (outputs, inputs) in linear.items()},
            head=head,
            matmul_parameters=sum(map(prod, linear.values())) + (head or self.vocab_size * self.hidden_size),
            blocks=self.layers,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            kept_numbers=self._num_kept_values,
            norm_numbers=self._num_norm_values,
            largest_parameter=max(map(prod, weights.values())),
        )

    @property
    def _num_norm_values(self) -> int:
        """Number of values per token that are inputs of the norms of one block."""
        width = (self.heads + self.kv_heads) * self.head_size if self._norms else 0
        return 2 * self.hidden_size + width

    @property
    def _num_kept_values(self) -> int:
        """Number of values per token that autograd keeps for one block.

        For each norm: input, normalized values, output. For attention: queries, keys, values, and the output twice, the
        second time for its projection. For the MLP: gate, SiLU of the gate, other factor, product.
        """
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        norms = 6 * self.hidden_size + (2 * (queries + keys) if self._norms else 0)
        return norms + 3 * queries + 2 * keys + 4 * self.intermediate_size


R = TypeVar("R", bound="_Plain")

FLOATS: Final = ("F32", "BF16", "F16")
ANOTHER: Final = ("model.safetensors.index.json", "adapter_config.json")
"""Names of files that would make transformers load other weights than those in model.safetensors."""


class _Plain(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class _Rope(_Plain):
    model_config = ConfigDict(extra="forbid")

    rope_theta: float
    rope_type: Literal["default"]


class _Config(_Plain):
    """Fields of the config.json that transformers writes for a plain decoder (one whose weight shapes are known from
    its sizes). With any other field, the directory needs a full inspection."""

    model_config = ConfigDict(extra="forbid")

    model_type: Literal["llama", "qwen3"]
    architectures: list[str]
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    max_position_embeddings: PositiveInt
    tie_word_embeddings: bool
    hidden_act: Literal["silu"]
    rope_parameters: _Rope
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    rms_norm_eps: float
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    pretraining_tp: Literal[1] = 1
    use_cache: bool = True
    use_sliding_window: Literal[False] = False
    sliding_window: None = None
    max_window_layers: int = 0
    layer_types: list[Literal["full_attention"]] | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    transformers_version: str

    def decoder(self) -> DecoderSizes | None:
        """Return the sizes of the decoder, or None if the fields contradict each other."""
        fits = (
            self.architectures == [f"{CLASSES[self.model_type]}ForCausalLM"]
            and self.layer_types in (None, ["full_attention"] * self.num_hidden_layers)
            and self.num_attention_heads % self.num_key_value_heads == 0
            and self.hidden_size % self.num_attention_heads == 0
            and self.head_dim % 2 == 0
            and all(token is None or 0 <= token < self.vocab_size for token in (self.eos_token_id, self.pad_token_id))
        )
        if not fits:
            return None
        return DecoderSizes(
            architecture=self.model_type,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            layers=self.num_hidden_layers,
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads,
            head_size=self.head_dim,
            context=self.max_position_embeddings,
            tied=self.tie_word_embeddings,
        )


class _Generation(_Plain):
    """Fields of a generation_config.json that transformers derives from config.json, without other settings."""

    model_config = ConfigDict(extra="forbid")

    from_model: Literal[True] = Field(alias="_from_model_config")
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    output_attentions: Literal[False] = False
    output_hidden_states: Literal[False] = False
    use_cache: bool = True
    transformers_version: str


class _Tokenizer(_Plain):
    """Fields of the tokenizer_config.json of a tokenizer that is stored entirely in tokenizer.json and needs no special
    class."""

    tokenizer_class: Literal["TokenizersBackend"]
    auto_map: None = None


def read_plain(directory: Path) -> tuple[DecoderSizes, PreTrainedTokenizerFast] | None:
    """Return the sizes and the tokenizer of a model directory if it contains a complete decoder of a known kind, saved
    by transformers. Return None if the directory contains anything else or has errors."""
    try:
        decoder = _read(_Config, directory / "config.json").decoder()
        if (directory / "generation_config.json").exists():
            _read(_Generation, directory / "generation_config.json")
        _read(_Tokenizer, directory / "tokenizer_config.json")
        another = any((directory / name).exists() for name in ANOTHER)
        if decoder is None or another or _read_shapes(directory / "model.safetensors") != decoder.weights():
            return None
        tokenizer = load_tokenizer(directory, kind=PreTrainedTokenizerFast)
    except (OSError, ValueError, ValidationError, RecursionError, SafetensorError, BadInput):
        return None
    return (decoder, tokenizer) if len(tokenizer) <= decoder.vocab_size else None


def _read(kind: type[R], path: Path) -> R:
    return kind.model_validate(json.loads(path.read_text()))


def _read_shapes(path: Path) -> dict[str, Shape]:
    """Return the shapes of the weights in a safetensors file, by name, from its header. Raises SafetensorError if the
    file is truncated."""
    with safe_open(path, framework="numpy") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # it is no mapping
        if (opened.metadata() or {}).get("format") != "pt" or any(s.get_dtype() not in FLOATS for s in slices.values()):
            raise ValueError(
                f"{path}: the weights are not in the format of safetensors files that PyTorch models write with "
                "floating-point weights"
            )
        return {name: tuple(each.get_shape()) for name, each in slices.items()}
