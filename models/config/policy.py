"""Configuration of the policy that a run starts from. Torch-free."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field, field_validator, model_validator

from infra.config import Positive, Settings, Since
from infra.errors import BadInput
from infra.store.inputs import Location
from infra.variants import Variant


# ---- policy
class PolicySource(Variant):
    """What all sources of an initial policy share. `implementation` is a `models.modeling.initial.PolicyWriter`."""

    inspection: ClassVar[str]
    """`pkg.mod:function` that describes it before anything is built, a `models.inspection.directory.Inspection`."""
    brings_tokens: ClassVar[bool] = False
    """Whether its tokenizer comes with it, and is not trained from the data."""
    draws: ClassVar[bool] = False
    """Whether it draws pictures, and writes no text."""

    @property
    def picture_side(self) -> int | None:
        """Height and width of the pictures that its warm-up imitates; none where it imitates none."""
        return None

    def written_to(self, path: Location) -> "DirectoryPolicy | DiffusionPolicy":
        """Name a directory that holds what became of such a policy."""
        return DiffusionPolicy(path=path) if self.draws else DirectoryPolicy(path=path)


class ScratchPolicy(PolicySource):
    """A small decoder built from nothing, with a byte-level BPE trained on the data's text."""

    implementation = "models.modeling.initial:write_scratch"
    inspection = "models.inspection.directory:inspect_scratch"

    kind: Literal["scratch"] = "scratch"
    architecture: Literal["llama", "qwen3"] = "llama"
    """Shape of the decoder."""
    vocab_size: Annotated[int, Field(ge=300)] = 354
    """Tokens of the tokenizer, 256 bytes and the special ones included."""
    hidden_size: Annotated[int, Field(ge=8)] = 32
    """Width."""
    intermediate_size: Annotated[int, Field(ge=8)] = 96
    """Width of the MLP."""
    layers: Positive = 2
    """Decoder blocks."""
    heads: Positive = 4
    """Attention heads."""
    kv_heads: Positive = 4
    """Key-value heads."""
    context: Annotated[int, Field(ge=16)] = 256
    """Longest sequence in tokens."""
    initial_std: Annotated[float, Field(gt=0), Since("0.1.0", before=0.02)] = 0.02
    """Standard deviation of the initial weights."""

    @model_validator(mode="after")
    def _heads_divide(self) -> "ScratchPolicy":
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of heads {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        return self


class ScratchTower(Settings):
    """Tower of a policy that sees, as Idefics3 has it."""

    image_size: Annotated[int, Field(ge=4, le=4096)] = 24
    """Side in pixels to which images are resized."""
    patch_size: Positive = 4
    """Side of a patch in pixels."""
    scale_factor: Positive = 2
    """Side in patches of the square that becomes one token."""
    hidden_size: Annotated[int, Field(ge=8)] = 64
    """Width."""
    intermediate_size: Annotated[int, Field(ge=8)] = 128
    """Width of the MLP."""
    layers: Positive = 2
    """Blocks."""
    heads: Positive = 2
    """Attention heads."""
    initial_std: Annotated[float, Field(gt=0)] = 0.125
    """Standard deviation of the initial weights: 1 / √64."""

    @model_validator(mode="after")
    def _sizes_divide(self) -> "ScratchTower":
        side = self.patch_size * self.scale_factor
        if self.image_size % side:
            raise ValueError(f"image_size {self.image_size} is not a multiple of patch_size x scale_factor, {side}")
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of heads {self.heads}")
        return self


SEEING_DECODER: Final = ScratchPolicy(
    vocab_size=303, hidden_size=64, intermediate_size=192, heads=2, kv_heads=2, context=96, initial_std=0.125
)


class SeeingScratchPolicy(PolicySource):
    """A small policy that sees, built from nothing: Idefics3's tower in front of the scratch decoder."""

    implementation = "models.modeling.initial:write_seeing_scratch"
    inspection = "models.inspection.directory:inspect_seeing_scratch"

    kind: Literal["seeing_scratch"] = "seeing_scratch"
    tower: ScratchTower = ScratchTower()
    """What reads images."""
    decoder: ScratchPolicy = SEEING_DECODER
    """What reads and writes tokens; three of its vocabulary stand around images. What is not said of it is as here."""

    @field_validator("decoder", mode="before")
    @classmethod
    def _beside_defaults(cls, given: object) -> object:
        return {**SEEING_DECODER.model_dump(), **given} if isinstance(given, Mapping) else given

    @model_validator(mode="after")
    def _has_room_for_three(self) -> "SeeingScratchPolicy":
        if self.decoder.vocab_size < 303:
            raise ValueError(
                f"decoder.vocab_size {self.decoder.vocab_size}: images need 3 tokens, expected at least 303"
            )
        return self


class DirectoryPolicy(PolicySource):
    """Any directory in Hugging Face format of a causal language model, or of one that sees as well."""

    implementation = "models.modeling.initial:write_import"
    inspection = "models.inspection.directory:inspect_import"
    brings_tokens = True

    kind: Literal["directory"] = "directory"
    path: Location
    """Directory with config.json, safetensors, tokenizer, where it sees preprocessor_config.json, of this machine or
    at s3://bucket/name."""


SUM_ERROR: Final = 1e-6
"""How far from 1 the sum of a merge's weights may be."""


def reason_against_weights(weights: Sequence[float]) -> str | None:
    """Say why weights make no merge; none where they do."""
    total = math.fsum(weights)
    if abs(total - 1) <= SUM_ERROR:
        return None
    shown = " + ".join(f"{weight:g}" for weight in weights)
    return f"expected weights that sum to 1, found {shown} = {total:g}: all that the parents share would be scaled"


class MergeParent(Settings):
    """A policy that is merged, and its part in the sum."""

    path: Location
    """Its directory: of a model, or of an adapter, which counts as its base with the adapter added."""
    weight: float
    """Factor of its weights; negative ones are meant: with 1.75 and -0.75 the sum lies beyond the first."""


class MergePolicy(PolicySource):
    """The weighted sum of policies of one architecture and tokenizer, tensor by tensor, in float32."""

    implementation = "models.modeling.initial:write_merged_policy"
    inspection = "models.inspection.directory:inspect_merge"
    brings_tokens = True

    kind: Literal["merge"] = "merge"
    parents: Annotated[tuple[MergeParent, ...], Field(min_length=1)]
    """The policies; their weights sum to 1."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Precision of the sum, which is rounded once; none is that of the parents' files."""
    unrelated: bool = False
    """Also merge policies of runs that did not start from one policy."""

    @model_validator(mode="after")
    def _weights_sum_to_one(self) -> "MergePolicy":
        if (reason := reason_against_weights([parent.weight for parent in self.parents])) is not None:
            raise ValueError(f"parents: {reason}")
        return self


class DiffusionPolicy(PolicySource):
    """A directory in diffusers format that draws pictures: Stable Diffusion 1, 2, XL and 3, FLUX, Qwen-Image.

    Its denoiser is trained; text encoders and VAE stay as they are.
    """

    implementation = "models.denoising.policy:write_diffusion"
    inspection = "models.denoising.policy:inspect_diffusion"
    brings_tokens = True
    draws = True

    kind: Literal["diffusion"] = "diffusion"
    path: Location
    """Directory with model_index.json, of this machine or at s3://bucket/name."""


class ScratchDiffusionPolicy(PolicySource):
    """A small policy that draws, built from nothing: Stable Diffusion 3's transformer on pixels, without VAE."""

    implementation = "models.denoising.policy:write_scratch_diffusion"
    inspection = "models.denoising.policy:inspect_scratch_diffusion"
    draws = True

    kind: Literal["scratch_diffusion"] = "scratch_diffusion"
    side: Annotated[int, Field(ge=4, le=256)] = 8
    """Height and width of a picture; each of these is shown as 8 pixels."""
    patch_size: Positive = 2
    """Side of what becomes one token."""
    layers: Positive = 4
    """Blocks."""
    heads: Positive = 4
    """Attention heads."""
    head_size: Annotated[int, Field(ge=4)] = 16
    """Numbers of a head."""
    words: Annotated[int, Field(ge=4)] = 16
    """Longest prompt in words and signs, with two ends."""
    word_size: Annotated[int, Field(ge=4, multiple_of=2)] = 16
    """Numbers that each of the two text encoders makes of a word."""
    shift: Annotated[float, Field(gt=0)] = 1.0
    """How far levels of noise are shifted towards noise."""

    @property
    def picture_side(self) -> int:
        """Those that it draws, before they are scaled up."""
        return self.side

    @model_validator(mode="after")
    def _patches_divide(self) -> "ScratchDiffusionPolicy":
        if self.side % self.patch_size:
            raise ValueError(f"side {self.side} is not a multiple of patch_size {self.patch_size}")
        return self


PolicyConfig = Annotated[
    ScratchPolicy | SeeingScratchPolicy | DirectoryPolicy | MergePolicy | DiffusionPolicy | ScratchDiffusionPolicy,
    Field(discriminator="kind"),
]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What can be known of a policy without loading its weights."""

    parameters: int
    context: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    sees: str = ""
    """`model_type` of a model that reads images, empty of one that reads text alone."""
    experts: int = 0
    """Those that a token of a layer may be given; 0 where layers are dense."""
    replays_experts: bool = False
    """Whether its routers can be given the experts that they are to choose."""
    is_longrope: bool = False
    """Whether the context is limited so that a longrope model always uses its short factors."""
    slices: bool = True
    """Whether ranks may compute a pass together, each some heads of attention: its layers do without the others."""

    def check_slices(self, ranks: int, *, what: str) -> None:
        """Raise BadInput unless so many ranks can read a pass together; `what` is the model."""
        if ranks == 1:
            return
        where = f"update.sequence_parallel {ranks}"
        if self.sees:
            raise BadInput(f"{where}: expected a model that reads text alone, {what} is of model_type {self.sees!r}")
        if not self.slices:
            raise BadInput(
                f"{where}: expected a model whose tokens meet in attention alone, head by head, {what} has "
                "convolutions, recurrent layers, attention sinks, or a way of its own to look attention up"
            )
        for heads, kind in ((self.heads, "attention heads"), (self.kv_heads, "key-value heads")):
            if heads % ranks:
                raise BadInput(f"{where}: {what} has {heads} {kind}, expected a divisor of that")

    @property
    def context_text(self) -> str:
        """Description of the context for messages."""
        reason = " (the model is a longrope model, of which Rheostat uses the short factors only)"
        return f"{self.context} tokens{reason if self.is_longrope else ''}"

    @property
    def cached_numbers(self) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_size


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """What a model consists of, as far as training and adapters are concerned."""

    kind: str
    """Name of its class in transformers."""
    parameters: int
    layers: Mapping[str, int]
    """Linear layers that can have an adapter: inputs and outputs of each, together."""
    head: int = 0
    """Parameters of a classifier's head, which is trained in full beside adapters."""
    matmul_parameters: int = 0
    """Weights that multiply every token of text: linear layers and head; of experts, those that a token is sent to."""
    blocks: int = 0
    """Blocks of the decoder."""
    hidden_size: int = 0
    """Numbers of a token that a block keeps where it is computed again: of its state between blocks."""
    vocab_size: int = 0
    """Outputs of the head."""
    kept_numbers: int = 0
    """Numbers of a token that a block keeps for its backward pass in float32, where all of it is trained."""
    largest_block: float = 1.0
    """How many times as many the one of all blocks keeps that keeps most."""
    norm_numbers: int = 0
    """Widths of a block's norms: so many are kept more in bfloat16, and fewer where a norm's weight is not trained."""
    attentions: tuple[str, ...] = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")
    """Ways in which its class can compute attention."""
    recomputes: bool = True
    """Whether its blocks can be computed again in the backward pass."""
    takes_guidance: bool = False
    """Whether guidance is an input of a denoiser."""

    def guided(self, guidance: float) -> "ModelOutline":
        """The same as it is with guidance: each state is read without the prompt too, unless guidance is an input."""
        reads = 1 if guidance == 1 or self.takes_guidance else 2
        return replace(self, hidden_size=reads * self.hidden_size, kept_numbers=reads * self.kept_numbers)
