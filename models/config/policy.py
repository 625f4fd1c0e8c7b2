"""Configuration of the initial policy of a run. Torch-free."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field, field_validator, model_validator

from infra.config import Positive, Settings, Since
from infra.errors import BadInput
from infra.renamed import RenamedFrom, RenamedValue
from infra.store.inputs import Location
from infra.variants import Variant


# ---- policy
class PolicySource(Variant):
    """Fields common to all sources of an initial policy. `implementation` names a
    `models.modeling.initial.PolicyWriter`."""

    inspection: ClassVar[str]
    """`pkg.mod:function` that describes the policy before anything is built, a
    `models.inspection.directory.Inspection`."""
    brings_tokens: ClassVar[bool] = False
    """Whether the tokenizer comes with the policy and is not trained on the data."""
    generates_images: ClassVar[bool] = False
    """Whether this is a text-to-image policy, which generates no text."""

    @property
    def picture_side(self) -> int | None:
        """Height and width in pixels of the pictures imitated in warm-up, or None if the policy is not warmed up on
        pictures."""
        return None

    def with_path(self, path: Location) -> "DirectoryPolicy | DiffusionPolicy":
        """Return a source for a directory that contains a trained version of such a policy."""
        return DiffusionPolicy(path=path) if self.generates_images else DirectoryPolicy(path=path)


class ScratchPolicy(PolicySource):
    """A small decoder with random weights, and a byte-level BPE tokenizer trained on the data's text."""

    implementation = "models.modeling.initial:write_scratch"
    inspection = "models.inspection.directory:inspect_scratch"

    kind: Literal["scratch"] = "scratch"
    architecture: Literal["llama", "qwen3"] = "llama"
    """Decoder architecture."""
    vocab_size: Annotated[int, Field(ge=300)] = 354
    """Tokens of the tokenizer, including 256 bytes and the special tokens."""
    hidden_size: Annotated[int, Field(ge=8)] = 32
    """Hidden size."""
    intermediate_size: Annotated[int, Field(ge=8)] = 96
    """Hidden size of the MLP."""
    layers: Positive = 2
    """Number of decoder blocks."""
    heads: Positive = 4
    """Number of attention heads."""
    kv_heads: Positive = 4
    """Number of key-value heads."""
    context: Annotated[int, Field(ge=16)] = 256
    """Maximum sequence length in tokens."""
    initial_std: Annotated[float, Field(gt=0), Since("0.1.0", before=0.02)] = 0.02
    """Standard deviation of the initial weights."""

    @model_validator(mode="after")
    def _require_divisible_heads(self) -> "ScratchPolicy":
        if self.hidden_size % self.heads:
            raise ValueError(
                f"hidden_size is {self.hidden_size}, but it must be a multiple of heads, which is {self.heads}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads is {self.heads}, but it must be a multiple of kv_heads, which is {self.kv_heads}. Change one "
                "of them"
            )
        return self


class ScratchTower(Settings):
    """Vision tower of a vision-language policy, with the architecture of Idefics3."""

    image_size: Annotated[int, Field(ge=4, le=4096)] = 24
    """Side length in pixels to which images are resized."""
    patch_size: Positive = 4
    """Side length of a patch in pixels."""
    scale_factor: Positive = 2
    """Side length, in patches, of the square that becomes one token."""
    hidden_size: Annotated[int, Field(ge=8)] = 64
    """Hidden size."""
    intermediate_size: Annotated[int, Field(ge=8)] = 128
    """Hidden size of the MLP."""
    layers: Positive = 2
    """Number of transformer blocks."""
    heads: Positive = 2
    """Number of attention heads."""
    initial_std: Annotated[float, Field(gt=0)] = 0.125
    """Standard deviation of the initial weights. The default is 1 / √64."""

    @model_validator(mode="after")
    def _require_divisible_sizes(self) -> "ScratchTower":
        side = self.patch_size * self.scale_factor
        if self.image_size % side:
            raise ValueError(
                f"image_size is {self.image_size}, but it must be a multiple of patch_size x scale_factor = {side}. "
                "Change one of them"
            )
        if self.hidden_size % self.heads:
            raise ValueError(
                f"hidden_size is {self.hidden_size}, but it must be a multiple of heads, which is {self.heads}"
            )
        return self


VISION_DECODER: Final = ScratchPolicy(
    vocab_size=303, hidden_size=64, intermediate_size=192, heads=2, kv_heads=2, context=96, initial_std=0.125
)


class VisionScratchPolicy(PolicySource):
    """A small vision-language policy with random weights: Idefics3's vision tower in front of the scratch decoder."""

    implementation = "models.modeling.initial:write_vision_scratch"
    inspection = "models.inspection.directory:inspect_vision_scratch"

    kind: Annotated[Literal["scratch_vision"], RenamedValue("seeing_scratch", "scratch_vision")] = "scratch_vision"
    tower: ScratchTower = ScratchTower()
    """Vision tower, which encodes images."""
    decoder: ScratchPolicy = VISION_DECODER
    """Decoder, which reads and generates tokens. Three tokens of its vocabulary mark images. Keys that are not set have
    the defaults shown here."""

    @field_validator("decoder", mode="before")
    @classmethod
    def _add_decoder_defaults(cls, value: object) -> object:
        return {**VISION_DECODER.model_dump(), **value} if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def _require_image_tokens(self) -> "VisionScratchPolicy":
        if self.decoder.vocab_size < 303:
            raise ValueError(
                f"decoder.vocab_size is {self.decoder.vocab_size}, but images need 3 tokens: set it to at least 303"
            )
        return self


class DirectoryPolicy(PolicySource):
    """A directory in Hugging Face format with a causal language model or a vision-language model."""

    implementation = "models.modeling.initial:write_import"
    inspection = "models.inspection.directory:inspect_import"
    brings_tokens = True

    kind: Literal["directory"] = "directory"
    path: Location
    """Directory with config.json, safetensors and tokenizer, and preprocessor_config.json for a vision-language model,
    on this machine or at s3://bucket/name."""


SUM_ERROR: Final = 1e-6
"""Maximum deviation of the sum of a merge's weights from 1."""


def find_weights_conflict(weights: Sequence[float]) -> str | None:
    """Return why weights are invalid for a merge, or None if they are valid."""
    total = math.fsum(weights)
    if abs(total - 1) <= SUM_ERROR:
        return None
    terms = " + ".join(f"{weight:g}" for weight in weights)
    return f"weights must sum to 1, or all weights that the parents share would be scaled, but {terms} = {total:g}"


class MergeParent(Settings):
    """A policy to merge, with its weight in the sum."""

    path: Location
    """Directory of a model, or of an adapter, which is used as its base model with the adapter added."""
    weight: float
    """Factor of this policy in the sum. It may be negative: weights of 1.75 and -0.75 extrapolate beyond the first
    policy."""


class MergePolicy(PolicySource):
    """Weighted sum of policies with the same architecture and tokenizer, tensor by tensor, in float32."""

    implementation = "models.modeling.initial:write_merged_policy"
    inspection = "models.inspection.directory:inspect_merge"
    brings_tokens = True

    kind: Literal["merge"] = "merge"
    parents: Annotated[tuple[MergeParent, ...], Field(min_length=1)]
    """Policies to merge. Their weights must sum to 1."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Precision to which the sum is rounded once at the end. The default is the precision of the parents' files."""
    allow_unrelated: Annotated[bool, RenamedFrom("unrelated")] = False
    """Whether policies of runs that started from different policies may be merged."""

    @model_validator(mode="after")
    def _require_sum_of_one(self) -> "MergePolicy":
        if (reason := find_weights_conflict([parent.weight for parent in self.parents])) is not None:
            raise ValueError(f"parents: {reason}")
        return self


class DiffusionPolicy(PolicySource):
    """A text-to-image model directory in diffusers format: Stable Diffusion 1, 2, XL and 3, FLUX, Qwen-Image.

    Only its denoiser is trained. Text encoders and VAE are frozen.
    """

    implementation = "models.denoising.policy:write_diffusion"
    inspection = "models.denoising.policy:inspect_diffusion"
    brings_tokens = True
    generates_images = True

    kind: Literal["diffusion"] = "diffusion"
    path: Location
    """Directory with model_index.json, on this machine or at s3://bucket/name."""


class ScratchDiffusionPolicy(PolicySource):
    """A small text-to-image policy with random weights: Stable Diffusion 3's transformer on pixels, without VAE."""

    implementation = "models.denoising.policy:write_scratch_diffusion"
    inspection = "models.denoising.policy:inspect_scratch_diffusion"
    generates_images = True

    kind: Literal["scratch_diffusion"] = "scratch_diffusion"
    side: Annotated[int, Field(ge=4, le=256)] = 8
    """Height and width of a generated picture. The stored picture is 8 times as large on each side."""
    patch_size: Positive = 2
    """Side length of the patch that becomes one token."""
    layers: Positive = 4
    """Number of transformer blocks."""
    heads: Positive = 4
    """Number of attention heads."""
    head_size: Annotated[int, Field(ge=4)] = 16
    """Dimension of an attention head."""
    words: Annotated[int, Field(ge=4)] = 16
    """Maximum length of a prompt in words and punctuation marks, including the start and end tokens."""
    word_size: Annotated[int, Field(ge=4, multiple_of=2)] = 16
    """Embedding size of a word in each of the two text encoders."""
    shift: Annotated[float, Field(gt=0)] = 1.0
    """Shift of the noise schedule towards high noise levels."""

    @property
    def picture_side(self) -> int:
        """Height and width in pixels of the generated pictures before they are scaled up."""
        return self.side

    @model_validator(mode="after")
    def _require_divisible_side(self) -> "ScratchDiffusionPolicy":
        if self.side % self.patch_size:
            raise ValueError(
                f"side is {self.side}, but it must be a multiple of patch_size, which is {self.patch_size}. Change one "
                "of them"
            )
        return self


PolicyConfig = Annotated[
    ScratchPolicy | VisionScratchPolicy | DirectoryPolicy | MergePolicy | DiffusionPolicy | ScratchDiffusionPolicy,
    Field(discriminator="kind"),
]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Facts about a policy that are known without loading its weights."""

    parameters: int
    context: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vision_model_type: str = ""
    """`model_type` of a vision-language model, empty for a model that reads only text."""
    experts: int = 0
    """Number of experts per layer from which a router chooses, or 0 for dense layers."""
    replays_experts: bool = False
    """Whether its routers can replay recorded expert choices."""
    is_longrope: bool = False
    """Whether the context is limited so that a longrope model always uses its short factors."""
    slices: bool = True
    """Whether sequence parallelism is possible: all layers except attention treat tokens independently, and attention
    can be split by heads."""

    decoding_conflict: str = ""
    """Reason why the engine `transformers` cannot decode with the model, empty if no reason is known."""
    slow_chunk_tokens: int = 0
    """Number of tokens to whose multiples rows are padded in state-space layers that no kernel computes, or 0."""

    def check_decoding(self, engine: str) -> None:
        """Raise BadInput if the engine `transformers` cannot decode with the model. `engine` names its settings."""
        if self.decoding_conflict:
            raise BadInput(
                f"{engine}.kind = 'transformers' cannot decode with this model: {self.decoding_conflict}. Set "
                f"{engine}.kind = 'vllm' if vLLM supports the architecture, or use another model."
            )

    def check_slices(self, ranks: int, *, what: str) -> None:
        """Raise BadInput if this number of ranks cannot share a micro-batch by sequence parallelism.

        `what` names the model in messages.
        """
        if ranks == 1:
            return
        where = f"update.sequence_parallel is {ranks}"
        if self.vision_model_type:
            raise BadInput(
                f"{where}, but {what} has model_type {self.vision_model_type!r} and reads images. Set it to 1"
            )
        if not self.slices:
            raise BadInput(
                f"{where}, which needs a model whose tokens interact only in attention, head by head, but {what} has "
                "convolutions, recurrent layers, attention sinks, or its own way to select attention. Set it to 1"
            )
        for heads, kind in ((self.heads, "attention heads"), (self.kv_heads, "key-value heads")):
            if heads % ranks:
                raise BadInput(f"{where}, but {what} has {heads} {kind}. Set it to a divisor of {heads}")

    @property
    def context_text(self) -> str:
        """Description of the context for messages."""
        reason = " (a longrope model, for which Rheostat uses only the short factors)"
        return f"{self.context} tokens{reason if self.is_longrope else ''}"

    @property
    def cached_numbers(self) -> int:
        """Numbers in the KV cache per token: the keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """Size and structure of a model as needed to estimate training memory and to place adapters."""

    kind: str
    """Name of its class in transformers."""
    parameters: int
    layers: Mapping[str, int]
    """Inputs plus outputs of each linear layer that can have an adapter, by layer name."""
    head: int = 0
    """Parameters of a classifier head, which is fully trained even with adapters."""
    matmul_parameters: int = 0
    """Weights that multiply every text token: linear layers and the output layer, and the active experts of a
    mixture."""
    blocks: int = 0
    """Number of decoder blocks."""
    hidden_size: int = 0
    """Numbers per token that a block keeps if its activations are recomputed: its input state."""
    vocab_size: int = 0
    """Outputs of the output layer."""
    kept_numbers: int = 0
    """Numbers per token that a block keeps for its backward pass in float32 if all its weights are trained."""
    largest_block: float = 1.0
    """Activations of the largest block relative to the average block."""
    norm_numbers: int = 0
    """Sum of the widths of a block's norms: bfloat16 keeps this many more numbers per token, and frozen norm weights
    this many fewer."""
    attentions: tuple[str, ...] = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")
    """Attention implementations that its class supports."""
    recomputes: bool = True
    """Whether its blocks can be recomputed in the backward pass."""
    has_guidance_input: bool = False
    """Whether a denoiser takes guidance as an input."""

    def guided(self, guidance: float) -> "ModelOutline":
        """Return the outline for a guidance scale. Guidance doubles the computation per state, because it also needs a
        prediction without the prompt, except if guidance is an input of the denoiser."""
        reads = 1 if guidance == 1 or self.has_guidance_input else 2
        return replace(self, hidden_size=reads * self.hidden_size, kept_numbers=reads * self.kept_numbers)
