"""Configuration of the update: optimizer steps, entropy bonus, and the choice of loss and corrections. Torch-free."""

from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from rheostat.infra.config import Positive, Settings, Since
from rheostat.infra.errors import BadInput
from rheostat.models.config.attention import KERNELS, Attention
from rheostat.models.config.corrections import Correction as Correction  # users' losses import these from here
from rheostat.models.config.corrections import CorrectionConfig, TruncatedImportance
from rheostat.models.config.corrections import MaskedImportance as MaskedImportance
from rheostat.models.config.corrections import NoCorrection as NoCorrection
from rheostat.models.config.divergence import Kl, KlPenalty, NoKl
from rheostat.models.config.lora import LoraConfig
from rheostat.models.config.optimizers import AdamW, OptimizerConfig
from rheostat.models.config.policy import ModelShape
from rheostat.models.config.policy_losses import LossConfig, PpoClip
from rheostat.models.config.policy_losses import PolicyLoss as PolicyLoss  # users' losses import it from here

MAX_LOG_RATIO: Final = 20.0
"""Bound to which log-ratios are clipped before exp. e^20 = 4.9e8 is finite, and its product with 0 is 0."""

CHUNK_ELEMENTS: Final = 1 << 26
"""Number of float32 logits that are computed at once on a CPU: 256 MiB, plus the same for their gradient."""
CHUNK_SHARE: Final = 1 / 32
"""Share of a GPU's memory for one chunk of logits and the tensors computed from it. Smaller chunks need less memory,
but each adds its part to the gradient of the output layer separately."""
HEAD_COPIES: Final = 3
"""Number of float32 tensors of a chunk's size that exist at the same time: logits, log-softmax, and gradient."""


def chunk_elements_of(memory: float | None) -> int:
    """Return the maximum logits per chunk (a power of two) for a GPU with `memory` bytes, or for a CPU if it is
    None."""
    if memory is None:
        return CHUNK_ELEMENTS
    return 1 << int(memory * CHUNK_SHARE / (4 * HEAD_COPIES)).bit_length() - 1


# ---- entropy
class EntropyBonus(Settings):
    """Bonus for the entropy of the policy over the whole vocabulary, which keeps the policy exploring."""

    coefficient: Annotated[float, Field(ge=0)]
    """Factor of a token's entropy (in nats), which is subtracted from the token's loss. Entropies and losses are
    combined in the same way (`loss.aggregation`)."""
    final: Annotated[float, Field(ge=0)] | None = None
    """Coefficient in the last iteration, which is reached linearly. If not set, the coefficient is constant."""

    def coefficient_at(self, step: int, total: int) -> float:
        """Return the coefficient of iteration `step`, counted from 0, of `total` iterations."""
        final = self.coefficient if self.final is None else self.final
        return self.coefficient + (final - self.coefficient) * min(1.0, step / max(1, total - 1))


class PositiveNll(Settings):
    """Negative log-likelihood of correct completions as a term of the loss (VAPO, arXiv 2504.05118, section on the
    positive example LM loss): coefficient x the mean over all tokens of the correct completions in a minibatch."""

    coefficient: Annotated[float, Field(gt=0)] = 0.1
    """Factor of the mean, μ in the paper, which uses 0.1."""
    min_reward: float = 1.0
    """Lowest score of a correct completion in the reward term `metric`, before shift, scale and weight."""
    metric: str | None = None
    """Name of the reward term that decides which completions are correct. The default is the first term."""


# ---- the update
class UpdateConfig(Settings):
    """Settings for the update: the optimizer steps of an iteration."""

    checks = {"policy": "rheostat.models.inspection.training:check_memory"}

    optimizer: Annotated[OptimizerConfig, Since("0.1.0", before=AdamW())] = AdamW()
    """Optimizer of the policy. It is also used for warm-up, critics and reward models."""
    learning_rate: Annotated[float, Field(ge=0)] = 1e-6
    """Peak learning rate of the policy."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule over the whole run, after the warm-up steps."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Number of optimizer steps at the start of the run over which the learning rate rises linearly."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay, as in AdamW."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay rate of AdamW's first moment (mean of the gradients)."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """Decay rate of AdamW's second moment (mean of the squared gradients)."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Maximum global norm of the gradients. Gradients with a larger norm are scaled down to this norm."""
    minibatches: Positive = 4
    """Number of minibatches, and so of optimizer steps per epoch. The seed decides which groups are in which
    minibatch."""
    epochs: Annotated[Positive, Since("0.1.0", before=1)] = 1
    """Number of passes over the samples of an iteration. Each epoch uses the same minibatches in another order."""
    microbatch_tokens: Positive = 16384
    """Maximum tokens (with padding) and image patches of a micro-batch on one rank. Gradients are accumulated over the
    micro-batches of an optimizer step."""
    state_every: Annotated[Positive, Since("0.1.0", before=1)] = 1
    """Iterations between two stored optimizer states. Resuming repeats the updates since the last stored one."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    """DeepSpeed ZeRO stage. A run can be resumed with another stage if you accept the change (`--accept-change`)."""
    sequence_parallel: Annotated[Positive, Since("0.1.0", before=1)] = 1
    """Number of consecutive ranks that share each micro-batch: each rank has a slice of the tokens, and in attention a
    part of the heads (DeepSpeed-Ulysses, arXiv 2309.14509). `microbatch_tokens` then applies to all ranks of the group
    together."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of weights and activations. Optimizer moments and master weights are always float32."""
    activation_checkpointing: bool | None = None
    """Whether layers keep only their inputs and recompute the rest in the backward pass: less memory, a third more
    time, equal gradients. If not set, it is on if a micro-batch would otherwise keep more than 1 GiB and more than
    weights, gradients and optimizer state need together."""
    offload: Annotated[Literal["none", "optimizer", "parameters"], Since("0.1.0", before="none")] = "none"
    """Data kept in CPU memory while the GPU does not need it: "optimizer" keeps the optimizer state there and runs the
    optimizer steps on the CPU (ZeRO 1 to 3), "parameters" keeps the weights of all models there as well (ZeRO 3)."""
    attention: Annotated[Attention | None, Since("0.1.0", before=None)] = "auto"
    """Attention implementation. "auto" uses "varlen" (PyTorch's flash kernel for bfloat16 on GPUs) for packed rows if
    device, `dtype` and model support it, else the model's default (sdpa or eager). The other kernels also need a
    package (`flash-attn`, `flash-attn-3`). Runs from before 0.2.0 keep the model's default."""
    lora: LoraConfig | None = None
    """Settings of LoRA adapters, which are trained instead of the weights. If not set, all weights are trained."""
    freeze: Annotated[tuple[Literal["vision", "projector", "language"], ...], Since("0.1.0", before=())] = ()
    """Parts of a vision-language policy that are not trained: the vision tower, the projector (which maps its outputs
    to the decoder), or the decoder ("language"). Supervised warm-up trains all parts nevertheless."""
    loss: LossConfig = PpoClip()
    """Policy loss, computed from log-probs and advantages."""
    router_loss: Annotated[Annotated[float, Field(gt=0)] | None, Since("0.1.0", before=None)] = None
    """Coefficient of the load-balancing loss of a mixture of experts (arXiv 2101.03961, eq. 4 to 6): the mean over
    layers, computed on the trained tokens of a whole optimizer step. It costs one more forward pass to count the chosen
    experts. If not set, there is no such loss."""
    router_replay: Annotated[Literal["rollout"] | None, Since("0.1.0", before=None)] = None
    """Replay of expert choices in a mixture of experts (R3, arXiv 2510.11370). With "rollout", the trained policy uses
    for each token, context tokens included, the experts that were chosen during rollout, weighted by its current router
    logits. This applies to its optimizer steps and to its old log-probs. Reference, critic and teacher choose their own
    experts. Rollouts and samples store the choices. If not set, the policy chooses its experts again."""
    kl: Kl = NoKl()
    """Penalty in the loss on the KL divergence of the policy from the reference."""
    reference_dtype: Annotated[Literal["float32", "bfloat16"] | None, Since("0.2.0", before="float32")] = None
    """Precision of the reference model, which computes log-probs for the KL penalty. If not set, it is `dtype`, so
    that the divergence from an unchanged policy is 0. Under LoRA adapters it is always `dtype`."""
    entropy: Annotated[EntropyBonus | None, Since("0.2.0", before=None)] = None
    """Entropy bonus in the loss. It costs one more computation of the logits. If not set, there is none."""
    positive_nll: Annotated[PositiveNll | None, Since("0.2.0", before=None)] = None
    """Negative log-likelihood of correct completions as a term of the loss. If not set, there is none."""
    top_entropy: Annotated[Annotated[float, Field(gt=0, le=1)] | None, Since("0.2.0", before=None)] = None
    """Share of the trained tokens of a minibatch that the policy loss applies to: those with the highest entropy over
    the vocabulary before the update (arXiv 2506.01939, with 0.2). It costs one more forward pass for the first
    minibatch, or for all minibatches if the update computes no old log-probs. If not set, or 1, the loss applies to all
    tokens."""
    correction: CorrectionConfig = TruncatedImportance()
    """Correction of the difference between the log-probs that the engine recorded and those that the trainer
    computes."""
    stale_correction: CorrectionConfig | None = None
    """Correction for tokens that an earlier policy version generated. If not set, `correction` is used for them too."""
    max_staleness: Annotated[int, Field(ge=0)] | None = None
    """Maximum age of trained tokens in policy versions. Older tokens have weight 0. If not set, there is no limit."""

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
        """Raise BadInput if a setting needs expert routers or vision parts that the policy does not have."""
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

    def with_entropy_at(self, step: int, total: int) -> "UpdateConfig":
        """Return a copy of these settings with the entropy bonus of iteration `step`, counted from 0, of `total`."""
        if self.entropy is None:
            return self
        return self.model_copy(update={"entropy": EntropyBonus(coefficient=self.entropy.coefficient_at(step, total))})

    @property
    def steps(self) -> int:
        """Optimizer steps per iteration, provided that every minibatch has samples to train on."""
        return self.minibatches * self.epochs

    @property
    def running_stage(self) -> int:
        """ZeRO stage that is used: at least 2 in bfloat16, because only from stage 2 on DeepSpeed sums gradients in
        float32."""
        return self.zero_stage if self.dtype == "float32" else max(2, self.zero_stage)

    @property
    def shards_weights(self) -> bool:
        """Whether every rank stores only its shard of the weights of each model (ZeRO-3)."""
        return self.zero_stage == 3

    @property
    def for_reference(self) -> "UpdateConfig":
        """Copy of these settings with the precision and the attention implementation of the reference model."""
        return self.model_copy(update={"dtype": self.reference_precision, "attention": self.reference_attention})

    @property
    def reference_precision(self) -> Literal["float32", "bfloat16"]:
        """Precision of the reference model."""
        return self.reference_dtype or self.dtype

    @property
    def reference_attention(self) -> Attention | None:
        """Attention implementation of the reference model. None (the model's default) if the reference runs in float32
        and a kernel is configured, because kernels do not support float32."""
        return None if self.reference_precision == "float32" and self.attention in KERNELS else self.attention

    @property
    def offloaded(self) -> tuple[str, ...]:
        """Parts of a rank's memory that are kept in CPU memory: the optimizer states, and the weights of all models."""
        states, weights = ("optimizer", "critic_optimizer"), ("weights", "critic_weights", "reference", "teacher")
        return {"none": (), "optimizer": states, "parameters": (*states, *weights)}[self.offload]

    @property
    def trains_vision(self) -> bool:
        """Whether the vision tower or the projector of a vision-language policy is trained."""
        return self.lora is None and not {"vision", "projector"} <= {*self.freeze}

    @property
    def corrections(self) -> tuple[CorrectionConfig, ...]:
        """Importance corrections in use: `correction`, and `stale_correction` if it is set."""
        return (self.correction,) if self.stale_correction is None else (self.correction, self.stale_correction)

    @property
    def masks_outliers(self) -> bool:
        """Whether an importance correction masks outliers of a minibatch, which requires the log-probs of the whole
        minibatch before its first step."""
        return any(correction.moment_limit is not None for correction in self.corrections)

    @property
    def masks_low_entropy(self) -> bool:
        """Whether `top_entropy` masks tokens, which requires the entropies of the whole minibatch before its first
        step."""
        return self.top_entropy is not None and self.top_entropy < 1

    @property
    def kl_penalty(self) -> KlPenalty | None:
        """KL penalty in the loss, or None if `kl` configures none."""
        return self.kl if isinstance(self.kl, KlPenalty) else None
