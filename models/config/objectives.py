"""Configuration of the update: policy losses, KL penalties, importance corrections and optimizer steps. Torch-free."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

from pydantic import Field, model_validator

from infra.config import Positive, Settings, Since
from infra.errors import BadInput
from infra.variants import OneOf, Target, Variant
from models.config.attention import FLASH, Attention
from models.config.lora import LoraConfig
from models.config.optimizers import AdamW, OptimizerConfig
from models.config.policy import ModelShape

if TYPE_CHECKING:
    from models.config.job import Job

MAX_LOG_RATIO: Final = 20.0
"""Bound of log-ratios before exp. e^20 = 4.9e8 is finite, and its product with 0 is 0."""

CHUNK_ELEMENTS: Final = 1 << 26
"""Number of float32 logits computed at once on a CPU: 256 MiB, plus the same for their gradient."""
CHUNK_SHARE: Final = 1 / 32
"""Share of a GPU's memory for one chunk of logits and the tensors computed from it. Smaller chunks need less memory,
but every chunk adds one accumulation of the output layer's gradient."""
HEAD_COPIES: Final = 3
"""Number of float32 tensors of a chunk's size that exist at once: the logits, their log-softmax and the gradient."""


def chunk_elements_of(memory: float | None) -> int:
    """Return the maximum logits per chunk (a power of two) for a GPU's memory in bytes, or for a CPU if it is None."""
    if memory is None:
        return CHUNK_ELEMENTS
    return 1 << int(memory * CHUNK_SHARE / (4 * HEAD_COPIES)).bit_length() - 1


# ---- aggregation
class TokenMean(Settings):
    """Mean of the loss over all tokens of the batch (DAPO)."""

    kind: Literal["token"] = "token"


class SequenceMean(Settings):
    """Mean over completions of each completion's mean loss per token (GRPO). An episode counts as one completion."""

    kind: Literal["sequence"] = "sequence"


class ConstantMean(Settings):
    """Sum of the token losses divided by completions x a fixed length (Dr. GRPO). An episode counts as one
    completion."""

    kind: Literal["constant"] = "constant"
    length: Positive
    """Fixed length in tokens."""


Aggregation = Annotated[TokenMean | SequenceMean | ConstantMean, Field(discriminator="kind")]


# ---- losses
class PolicyLoss(Variant):
    """Fields common to all policy losses. `implementation` names a `models.objectives.loss_inputs.LossFunction`."""

    compares_sequences: ClassVar[bool] = False
    """Whether the probability ratio is computed for a whole completion and not per token."""
    gradient_by_token: ClassVar[bool] = False
    """Whether the gradient of a token's loss depends only on the token's own log-prob. If so, the backward pass can
    reuse the logits and does not compute them again."""

    aggregation: Aggregation = TokenMean()
    """Aggregation of the losses of all tokens to one number."""

    def find_conflicts(self, job: "Job") -> Iterator[str]:
        """Yield one line per conflict of the loss with other settings of the job."""
        yield from ()


class PpoClip(PolicyLoss):
    """Clipped surrogate loss (PPO, arXiv 1707.06347) with separate bounds (clip-higher, DAPO, 2503.14476)."""

    implementation = "models.objectives.losses:ppo_clip"
    gradient_by_token = True

    kind: Literal["ppo_clip"] = "ppo_clip"
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Distance of the lower bound from 1: ratios below 1 - clip_low are clipped."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """Distance of the upper bound from 1: ratios above 1 + clip_high are clipped."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Factor c of the bound c x |advantage| on the loss of tokens with negative advantage (arXiv 1912.09729, eq. 5). If
    not set, this loss has no upper bound."""

    def find_conflicts(self, job: "Job") -> Iterator[str]:
        """Yield a conflict if `dual_clip` does not exceed 1 + clip_high."""
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            yield (
                f"update.loss.dual_clip is {self.dual_clip:g}, but it must be more than 1 + clip_high = "
                f"{1 + self.clip_high:g}, or it would affect ratios that are not clipped. Raise it"
            )


class Gspo(PolicyLoss):
    """Clipped ratio of whole sequences, exp(mean token log-ratio) (GSPO, arXiv 2507.18071, eq. 5 and 7)."""

    implementation = "models.objectives.losses:gspo"
    compares_sequences = True

    kind: Literal["gspo"] = "gspo"
    aggregation: Aggregation = SequenceMean()
    """Aggregation of the token losses to one number."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 3e-4
    """Distance of the lower bound from 1: ratios below 1 - clip_low are clipped."""
    clip_high: Annotated[float, Field(gt=0)] = 4e-4
    """Distance of the upper bound from 1: ratios above 1 + clip_high are clipped."""

    def find_conflicts(self, job: "Job") -> Iterator[str]:
        """Yield a conflict if the old log-probs come from the engine, because its rounding errors exceed the narrow
        clip range."""
        if not job.update.correction.compares_with_trainer:
            yield (
                "update.loss.kind = 'gspo' cannot be combined with update.correction.kind = 'none': log-probs of "
                "engine and trainer differ by more than the bounds of this loss. Use 'truncated' or 'masked'"
            )


class Cispo(PolicyLoss):
    """Log-prob times a clipped importance weight without gradient (CISPO, arXiv 2506.13585, eq. 4)."""

    implementation = "models.objectives.losses:cispo"
    gradient_by_token = True

    kind: Literal["cispo"] = "cispo"
    clip_low: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Distance of the weight's lower bound from 1. With 1 there is no lower bound."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """Distance of the weight's upper bound from 1."""


class PolicyGradient(PolicyLoss):
    """Log-prob times advantage (REINFORCE) without clipping. Use one optimizer step per iteration."""

    implementation = "models.objectives.losses:policy_gradient"
    gradient_by_token = True

    kind: Literal["policy_gradient"] = "policy_gradient"

    def find_conflicts(self, job: "Job") -> Iterator[str]:
        """Yield a conflict if an iteration has several optimizer steps, because this loss does not correct for earlier
        steps."""
        for name in ("minibatches", "epochs"):
            if (count := getattr(job.update, name)) > 1:
                yield (
                    f"update.{name} is {count}, but update.loss.kind = 'policy_gradient' does not correct for earlier "
                    "steps of an iteration. Set it to 1, or use the loss 'ppo_clip' or 'cispo'"
                )


class TargetLoss(Target):
    """User-defined loss: a subclass of `models.config.objectives.PolicyLoss` (see "Extending")."""


LossConfig = Annotated[PolicyLoss, OneOf((PpoClip, Gspo, Cispo, PolicyGradient, TargetLoss))]


# ---- divergence from the reference
class AdaptiveKl(Settings):
    """Controller that adapts a KL coefficient to a target (arXiv 1909.08593, section 2.2). Resuming restores its
    state."""

    target: Annotated[float, Field(gt=0)]
    """Target divergence in nats per token."""
    horizon: Positive = 10_000
    """Time constant in completions: each iteration multiplies the coefficient by exp(error x completions / horizon).
    The relative error is clipped to ±0.2."""


class NoKl(Settings):
    """No KL penalty and no reference model."""

    kind: Literal["none"] = "none"


class KlPenalty(Settings):
    """Penalty in the loss on the divergence from the initial policy."""

    kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence per token: k1, k2 or k3 (Schulman, "Approximating KL divergence")."""
    coefficient: Annotated[float, Field(gt=0)] = 1e-3
    """Factor of the penalty in the loss. With `adaptive`, the initial factor."""
    adaptive: AdaptiveKl | None = None
    """Controller that changes the coefficient after each iteration. If not set, the coefficient is constant."""


Kl = Annotated[NoKl | KlPenalty, Field(discriminator="kind")]


# ---- the mismatch between engine and trainer
class Correction(Variant):
    """Fields common to all importance corrections. `implementation` names a
    `models.objectives.importance.CorrectionFunction`."""

    compares_with_trainer: ClassVar[bool] = True
    """Whether the trainer computes old log-probs before the update. If not, the engine's log-probs are used as old
    log-probs."""


class NoCorrection(Correction):
    """No correction: behavior log-probs are used as old log-probs. The first step still measures the mismatch."""

    implementation = "models.objectives.importance:uncorrected"
    compares_with_trainer = False

    kind: Literal["none"] = "none"


class TruncatedImportance(Correction):
    """Loss weighted by min(π_old / π_behavior, cap), where π_behavior is the policy as the engine computes it.

    The trainer computes π_old. Steps after the first use the engine's log-probs as π_old if both are equal up to
    rounding: with the transformers engine in float32, an update in float32, and no stale tokens.
    """

    implementation = "models.objectives.importance:truncated"

    kind: Literal["truncated"] = "truncated"
    cap: Annotated[float, Field(ge=1)] = 2.0
    """Upper bound of the weight."""


class MaskedImportance(Correction):
    """Loss weighted by π_old / π_behavior, or by 0 if this ratio is outside a band. π_behavior is the engine's
    policy."""

    implementation = "models.objectives.importance:masked"

    kind: Literal["masked"] = "masked"
    low: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Lower bound of the band."""
    high: Annotated[float, Field(gt=1)] = 2.0
    """Upper bound of the band."""


CorrectionConfig = Annotated[NoCorrection | TruncatedImportance | MaskedImportance, Field(discriminator="kind")]


# ---- the update
class UpdateConfig(Settings):
    """Settings for the optimizer steps of an iteration."""

    optimizer: Annotated[OptimizerConfig, Since("0.1.0", before=AdamW())] = AdamW()
    """Optimizer of the policy, also used in warm-up and for critics and reward models."""
    learning_rate: Annotated[float, Field(ge=0)] = 1e-6
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule over the run after the warm-up steps."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Number of optimizer steps over which the learning rate rises linearly."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay rate of AdamW's first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """Decay rate of AdamW's second moment."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Maximum global norm of the gradients. Larger gradients are scaled down to it."""
    minibatches: Positive = 4
    """Optimizer steps per epoch. The assignment of groups to minibatches is derived from the seed."""
    epochs: Annotated[Positive, Since("0.1.0", before=1)] = 1
    """Number of passes over the samples of an iteration. The minibatches stay the same, in another order for each
    epoch."""
    microbatch_tokens: Positive = 16384
    """Maximum tokens (with padding) and image patches of a micro-batch on one rank. Gradients are accumulated over the
    micro-batches of an optimizer step."""
    state_every: Annotated[Positive, Since("0.1.0", before=1)] = 1
    """Interval, in updates, at which the optimizer state is stored. Resuming repeats the updates since the last stored
    state."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    """DeepSpeed ZeRO stage. A run can continue with another stage if this change is accepted."""
    sequence_parallel: Annotated[Positive, Since("0.1.0", before=1)] = 1
    """Number of consecutive ranks that share each micro-batch: each rank has a slice of the tokens, and in attention a
    part of the heads (DeepSpeed-Ulysses, arXiv 2309.14509). `microbatch_tokens` then applies to all ranks of the group
    together."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of weights and activations. Optimizer moments and master weights are always float32."""
    activation_checkpointing: bool | None = None
    """Whether layers keep only their inputs and compute the rest again in the backward pass: less memory, a third more
    time, equal gradients. If not set, it is on if a micro-batch would otherwise keep more than 1 GiB and more than
    weights, gradients and optimizer state need together."""
    offload: Annotated[Literal["none", "optimizer", "parameters"], Since("0.1.0", before="none")] = "none"
    """Data kept in CPU memory while the GPU does not need it: "optimizer" keeps the optimizer state there and runs its
    steps on the CPU (ZeRO 1 to 3), "parameters" keeps the weights there as well (ZeRO 3)."""
    attention: Annotated[Attention | None, Since("0.1.0", before=None)] = None
    """Attention implementation. If not set, the default of the model is used: sdpa, or eager if the model class
    requires it. Flash kernels need bfloat16, GPUs and a separate package (`flash-attn`, `flash-attn-3`). A reference
    model in float32 keeps its default."""
    lora: LoraConfig | None = None
    """LoRA adapters to train. If not set, all weights are trained."""
    freeze: Annotated[tuple[Literal["vision", "projector", "language"], ...], Since("0.1.0", before=())] = ()
    """Parts of a vision-language policy that are not trained: the vision tower, the projector (which maps its outputs
    to the decoder), or the decoder ("language"). Warm-up on worked examples trains all parts."""
    loss: LossConfig = PpoClip()
    """Policy loss."""
    router_loss: Annotated[Annotated[float, Field(gt=0)] | None, Since("0.1.0", before=None)] = None
    """Coefficient of the load-balancing loss of a mixture of experts (arXiv 2101.03961, eq. 4 to 6): the mean over
    layers, computed on the trained tokens of a whole optimizer step. It costs one more forward pass to count the chosen
    experts. If not set, there is no such loss."""
    router_replay: Annotated[Literal["rollout"] | None, Since("0.1.0", before=None)] = None
    """Replay of expert choices in a mixture of experts (R3, arXiv 2510.11370). With "rollout", the routers choose for
    each token the experts that were chosen during rollout, for context tokens too, and weight them by their own logits.
    This applies to the trained policy, in its optimizer steps and when its old log-probs are computed. Reference,
    critic and teacher choose their own experts. Rollouts and samples store the choices. If not set, the policy chooses
    its experts again."""
    kl: Kl = NoKl()
    """Penalty in the loss on the divergence from the initial policy."""
    correction: CorrectionConfig = TruncatedImportance()
    """Correction of the mismatch between the log-probs of the engine and of the trainer."""
    stale_correction: CorrectionConfig | None = None
    """Correction for tokens that an earlier policy version generated. If not set, `correction` is used for them too."""
    max_staleness: Annotated[int, Field(ge=0)] | None = None
    """Maximum age of tokens in policy versions. Older tokens have weight 0 in the loss. If not set, no token is too
    old."""

    @model_validator(mode="after")
    def _check_router_settings(self) -> "UpdateConfig":
        if self.router_loss is not None and self.zero_stage == 3:
            raise ValueError("router_loss cannot be combined with zero_stage = 3, which splits routers. Use at most 2")
        if self.router_replay is not None and self.sequence_parallel > 1:
            raise ValueError(
                "router_replay cannot be combined with a sequence_parallel above 1. Remove router_replay, or set "
                "sequence_parallel = 1"
            )
        return self

    @model_validator(mode="after")
    def _require_trained_parameters(self) -> "UpdateConfig":
        if self.freeze and self.lora is not None:
            raise ValueError("freeze cannot be combined with lora, which freezes all other weights. Remove freeze")
        min_stage = {"none": 0, "optimizer": 1, "parameters": 3}[self.offload]
        if self.running_stage < min_stage:
            raise ValueError(
                f"offload is {self.offload!r}, but this needs zero_stage {min_stage} or more, and zero_stage is "
                f"{self.zero_stage}. Raise zero_stage"
            )
        if len(set(self.freeze)) == 3:
            raise ValueError(
                "freeze contains vision, projector and language, so nothing is left to train. Remove one of them"
            )
        return self

    def check_model(self, shape: ModelShape) -> None:
        """Raise BadInput if a key needs routers or vision parts that the policy does not have."""
        for key in ("router_loss", "router_replay"):
            if getattr(self, key) is not None and not shape.experts:
                raise BadInput(f"update.{key} needs a policy with experts and routers, but it has none. Remove the key")
        if self.router_replay is not None and not shape.replays_experts:
            raise BadInput(
                "update.router_replay needs routers that choose experts by one call of topk, but the policy's routers "
                "do something else. Remove the key"
            )
        if self.freeze and not shape.vision_model_type:
            raise BadInput(
                f"update.freeze contains {[*self.freeze]}, but vision, projector and language are parts of "
                "vision-language policies, and this policy reads only text. Remove update.freeze"
            )

    @property
    def steps(self) -> int:
        """Optimizer steps per iteration, if every minibatch has samples to train on."""
        return self.minibatches * self.epochs

    @property
    def running_stage(self) -> int:
        """Effective ZeRO stage: at least 2 in bfloat16, because DeepSpeed sums gradients in float32 only from stage 2
        on."""
        return self.zero_stage if self.dtype == "float32" else max(2, self.zero_stage)

    @property
    def wide_attention(self) -> Attention | None:
        """Attention implementation for models in float32: the configured one, or None (the model's default) if it is a
        flash kernel, because these kernels do not support float32."""
        return None if self.attention in FLASH else self.attention

    @property
    def offloaded(self) -> tuple[str, ...]:
        """Data of a rank that is kept in CPU memory and not on the GPU: "optimizer", "weights", both or none."""
        return {"none": (), "optimizer": ("optimizer",), "parameters": ("optimizer", "weights")}[self.offload]

    @property
    def trains_vision(self) -> bool:
        """Whether the vision tower or the projector of a vision-language policy is trained."""
        return self.lora is None and not {"vision", "projector"} <= {*self.freeze}

    @property
    def kl_penalty(self) -> KlPenalty | None:
        """KL penalty in the loss, or None if there is none."""
        return self.kl if isinstance(self.kl, KlPenalty) else None
