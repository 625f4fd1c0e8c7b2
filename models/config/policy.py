"""Configuration of the initial policy of a run. Torch-free."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from rheostat.infra.config import Positive, Settings, Since
from rheostat.infra.demos import FORMER_POLICY_KINDS
from rheostat.infra.errors import BadInput
from rheostat.infra.renamed import RenamedFrom
from rheostat.infra.store.inputs import ModelLocation
from rheostat.infra.variants import OneOf, Target, Variant
from rheostat.models.config.context import LongropeScale
from rheostat.models.config.merging import LinearMerge, MergeMethodConfig


# ---- policy
class PolicySource(Variant):
    """Fields common to all sources of an initial policy. `implementation` names a
    `rheostat.models.modeling.initial.PolicyWriter`, which writes the policy into the run."""

    checks = {"policy": "rheostat.models.inspection.training:check_policy"}
    inspection: ClassVar[str]
    """Import path of a `rheostat.models.inspection.directory.Inspection`, which reads the policy's properties before a
    run begins."""
    brings_tokens: ClassVar[bool] = False
    """Whether the policy comes with a tokenizer. If not, a tokenizer is trained on the data."""
    generates_images: ClassVar[bool] = False
    """Whether this is a text-to-image policy. Such a policy generates no text."""

    @property
    def picture_side(self) -> int | None:
        """Height and width in pixels of the pictures on which warm-up trains the policy. None without such a
        warm-up."""
        return None

    @property
    def copied_model(self) -> ModelLocation | None:
        """Location of the language model whose files become the initial policy, or None if new files are written."""
        return None

    def with_path(self, path: ModelLocation) -> "DirectoryPolicy | DiffusionPolicy":
        """Return a source of the same type (text or text-to-image) that reads a trained policy from the directory
        `path`."""
        return DiffusionPolicy(path=path) if self.generates_images else DirectoryPolicy(path=path)


class ScratchPolicy(PolicySource):
    """Small decoder with random weights, and a byte-level BPE tokenizer trained on the data's text."""

    implementation = "rheostat.models.modeling.initial:write_scratch"
    inspection = "rheostat.models.inspection.directory:inspect_scratch"

    kind: Literal["scratch"] = "scratch"
    architecture: Literal["llama", "qwen3"] = "llama"
    """Architecture of the decoder, as implemented in transformers."""
    vocab_size: Annotated[int, Field(ge=300)] = 354
    """Number of tokens in the vocabulary, including one for each of the 256 bytes and the special tokens."""
    hidden_size: Annotated[int, Field(ge=8)] = 32
    """Size of the hidden state of a token. Must be a multiple of `heads`."""
    intermediate_size: Annotated[int, Field(ge=8)] = 96
    """Hidden size of the MLP in each decoder block."""
    layers: Positive = 2
    """Number of decoder blocks."""
    heads: Positive = 4
    """Number of attention heads in each decoder block."""
    kv_heads: Positive = 4
    """Number of key-value heads. Must be a divisor of `heads`."""
    context: Annotated[int, Field(ge=16)] = 256
    """Maximum sequence length in tokens."""
    initial_std: Annotated[float, Field(gt=0), Since("0.1.0", before=0.02)] = 0.02
    """Standard deviation of the normal distribution of the initial weights."""

    @model_validator(mode="after")
    def _require_divisible_heads(self) -> "ScratchPolicy":
        if self.hidden_size % self.heads:
            raise ValueError(
                f"hidden_size is {self.hidden_size}, but it must be a multiple of heads, which is {self.heads}. "
                "Change one of them"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads is {self.heads}, but it must be a multiple of kv_heads, which is {self.kv_heads}. Change one "
                "of them"
            )
        return self


class DirectoryPolicy(PolicySource):
    """Causal language model or vision-language model, loaded from a directory in Hugging Face format."""

    implementation = "rheostat.models.modeling.initial:write_import"
    inspection = "rheostat.models.inspection.directory:inspect_import"
    brings_tokens = True

    kind: Literal["directory"] = "directory"
    path: ModelLocation
    """Directory with config.json, safetensors and tokenizer, and preprocessor_config.json for a vision-language model:
    on this machine, at s3://bucket/name, or the name of a model on the Hugging Face Hub, such as `Qwen/Qwen3-0.6B`
    (docs/hub.md)."""
    context: Annotated[Positive | None, Since("0.2.0", before=None)] = None
    """Maximum sequence length in tokens, for models such as Bloom whose config.json contains no limit. Stored as
    `max_position_embeddings` in the run's copy of the policy."""

    @property
    def copied_model(self) -> ModelLocation | None:
        """Location of the model."""
        return self.path


class MergeParent(Settings):
    """One of the policies that are merged, with its weight in the sum."""

    path: ModelLocation
    """Directory, or name on the Hugging Face Hub, of a model or a LoRA adapter. An adapter is added to its base model
    before merging."""
    weight: float
    """Factor of this policy, or of its difference from the base model. With the methods `linear` and `slerp` all
    weights must sum to 1, but they may be negative: 1.75 and -0.75 extrapolate beyond the first policy."""


class MergePolicy(PolicySource):
    """Merge of several policies with the same architecture and tokenizer, computed tensor by tensor in float32. By
    default, the merged policy is their weighted sum."""

    implementation = "rheostat.models.modeling.initial:write_merged_policy"
    inspection = "rheostat.models.inspection.directory:inspect_merge"
    brings_tokens = True

    kind: Literal["merge"] = "merge"
    parents: Annotated[tuple[MergeParent, ...], Field(min_length=1)]
    """Policies to merge."""
    method: Annotated[MergeMethodConfig, Since("0.2.0", before=LinearMerge())] = LinearMerge()
    """Method that computes the merged weights."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Precision in which the merged weights are stored. The default is the precision of the merged policies' files."""
    allow_unrelated: Annotated[bool, RenamedFrom("unrelated")] = False
    """Whether policies may be merged although their runs started from different initial policies."""

    @model_validator(mode="after")
    def _require_valid_weights(self) -> "MergePolicy":
        if (reason := self.method.find_weights_conflict([parent.weight for parent in self.parents])) is not None:
            raise ValueError(f"parents: {reason}")
        return self


class DiffusionPolicy(PolicySource):
    """Text-to-image model directory in diffusers format: Stable Diffusion 1, 2, XL and 3, FLUX, Qwen-Image.

    Only the denoiser is trained. Text encoders and VAE are frozen.
    """

    implementation = "rheostat.models.denoising.policy:write_diffusion"
    inspection = "rheostat.models.denoising.policy:inspect_diffusion"
    brings_tokens = True
    generates_images = True

    kind: Literal["diffusion"] = "diffusion"
    path: ModelLocation
    """Directory with model_index.json on this machine or at s3://bucket/name, or a name on the Hugging Face Hub."""


class TargetPolicy(Target):
    """User-defined source of the initial policy: a subclass of `rheostat.models.config.policy.PolicySource` (see
    "Extending" in the documentation)."""

    former_kinds = FORMER_POLICY_KINDS


PolicyConfig = Annotated[
    PolicySource, OneOf((ScratchPolicy, DirectoryPolicy, MergePolicy, DiffusionPolicy, TargetPolicy))
]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Properties of a policy that are known without loading its weights."""

    parameters: int
    context: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vision_model_type: str = ""
    """`model_type` of a vision-language model. Empty for a model that reads only text."""
    experts: int = 0
    """Number of experts per layer among which a router chooses, or 0 if the model is not a mixture of experts."""
    replays_experts: bool = False
    """Whether the model's routers can be made to choose recorded experts instead of their own."""
    longrope_scales: tuple[LongropeScale, ...] = ()
    """Scales of a longrope model, whose context is limited to the length at which its position factors change."""
    slices: bool = True
    """Whether the model supports sequence parallelism. If so, tokens interact only in attention, and attention can be
    split by heads."""
    packs: bool = True
    """Whether one row of a batch can contain several sequences. If so, tokens interact only in attention."""

    decoding_conflict: str = ""
    """Reason why the engine `transformers` cannot decode with the model. Empty if no reason is known."""
    slow_chunk_tokens: int = 0
    """Chunk length, in tokens, of state-space layers that run without a fast kernel. Sequences are padded to multiples
    of this length. 0 if the model has no such layers."""

    def check_decoding(self, engine: str) -> None:
        """Raise BadInput if the engine `transformers` cannot decode with the model. `engine` is the engine's
        configuration key."""
        if self.decoding_conflict:
            raise BadInput(
                f"{engine}.kind = 'transformers' cannot decode with this model: {self.decoding_conflict}. Set "
                f"{engine}.kind = 'vllm' if vLLM supports the architecture, or use another model."
            )

    def check_slices(self, ranks: int, *, what: str) -> None:
        """Raise BadInput if sequence parallelism cannot split a micro-batch of this model over this number of ranks.

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
        """Maximum sequence length as text for messages, such as "4096 tokens". For a longrope model, the text adds that
        Rheostat uses only its short position factors, which limits the length."""
        reason = " (a longrope model, for which Rheostat uses only the short factors)"
        return f"{self.context} tokens{reason if self.longrope_scales else ''}"

    @property
    def cached_numbers(self) -> int:
        """Count of numbers that the KV cache stores for each token: the keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size
