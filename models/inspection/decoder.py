"""The decoders that are built from nothing, described without building them. Torch-free and pure."""

from dataclasses import dataclass
from math import prod
from typing import Final, Literal

from models.config.policy import ModelOutline, ModelShape, ScratchPolicy

Shape = tuple[int, ...]

CLASSES: Final = {"llama": "Llama", "qwen3": "Qwen3"}
"""How transformers' names of their classes begin."""


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """All that decides the shapes of a decoder's weights."""

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
    """Whether the head is the embedding itself."""

    @staticmethod
    def from_scratch(policy: ScratchPolicy, *, vocab_size: int) -> "DecoderSizes":
        """Describe what is built with a tokenizer of so many tokens."""
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
        """Say what decides memory and length."""
        return ModelShape(
            parameters=self.outline().parameters,
            context=self.context,
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_size=self.head_size,
        )

    def outline(self) -> ModelOutline:
        """Describe the language model."""
        return self._outlined("ForCausalLM", self.weights())

    def critic(self) -> ModelOutline:
        """Describe a classifier with one output on the same trunk."""
        trunk = {name: shape for name, shape in self.weights().items() if name != "lm_head.weight"}
        return self._outlined("ForSequenceClassification", trunk, head=self.hidden_size)

    def weights(self) -> dict[str, Shape]:
        """Name the language model's weights, each once, with its shape."""
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

    def _outlined(self, ending: str, weights: dict[str, Shape], *, head: int = 0) -> ModelOutline:
        layers = {n.removesuffix(".weight"): sum(shape) for n, shape in weights.items() if n.endswith("_proj.weight")}
        return ModelOutline(
            kind=f"{CLASSES[self.architecture]}{ending}",
            parameters=sum(map(prod, weights.values())) + head,
            layers=layers,
            head=head,
        )
