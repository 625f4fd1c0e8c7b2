"""Sizes of a model from which the memory of its training is estimated. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """Sizes and structure of a model that are needed to estimate the memory for training, and to find the layers that
    get LoRA adapters."""

    kind: str
    """Name of the model's class in transformers, such as `LlamaForCausalLM`."""
    parameters: int
    layers: Mapping[str, tuple[int, int]]
    """Input size and output size of each linear layer that can have a LoRA adapter, by layer name."""
    head: int = 0
    """Number of parameters of a classifier head, or 0. All of them are trained even if the other layers have
    adapters."""
    matmul_parameters: int = 0
    """Number of weights by which every text token is multiplied: those of the linear layers, of the output layer, and
    of the active experts in a mixture of experts."""
    blocks: int = 0
    """Number of decoder blocks."""
    hidden_size: int = 0
    """Count of numbers that a block stores for each token if its activations are recomputed: the size of its input
    state."""
    vocab_size: int = 0
    """Number of logits for each token: the output size of the output layer."""
    kept_numbers: int = 0
    """Count of numbers that a block stores for each token until its backward pass, in float32 and with all weights
    trained."""
    largest_block: float = 1.0
    """Size of the largest block's activations, divided by that of the average block."""
    norm_numbers: int = 0
    """Sum of the widths of the normalization layers in a block. In bfloat16 a block stores this many more numbers for
    each token. If the norm weights are frozen, it stores this many fewer."""
    attentions: tuple[str, ...] = ("sdpa", "eager", "varlen", "flash_attention_2", "flash_attention_3")
    """Attention implementations that the model's class in transformers supports."""
    recomputes: bool = True
    """Whether the activations of the blocks can be recomputed in the backward pass (activation checkpointing)."""
    largest_parameter: int = 0
    """Number of values in the largest parameter."""
    loads_directly: bool = True
    """Whether each parameter can be stored in the dtype of the update, and as the shard of a rank (ZeRO-3), as soon as
    it is read. Otherwise the model is loaded as a whole in float32 first."""
    has_guidance_input: bool = False
    """Whether a denoiser takes the scale of classifier-free guidance as an input."""

    def guided(self, guidance: float) -> "ModelOutline":
        """Return the outline of a denoiser that is trained with this scale of classifier-free guidance. The activations
        double, because each state also needs a prediction without the prompt. They stay equal if the scale is 1 or an
        input of the denoiser."""
        reads = 1 if guidance == 1 or self.has_guidance_input else 2
        return replace(self, hidden_size=reads * self.hidden_size, kept_numbers=reads * self.kept_numbers)
