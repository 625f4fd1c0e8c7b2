"""Configuration of the update: losses, penalties, corrections, optimizer. Torch-free; defaults are our recipe."""

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
"""Log-ratios count as at most so far from 0 where they are exponentiated: e^20 is 4.9e8, and 0 times it is still 0."""

CHUNK_ELEMENTS: Final = 1 << 26
"""Float32 logits held at once on a CPU: 256 MiB, and as much again for their gradient."""
CHUNK_SHARE: Final = 1 / 32
"""Of a GPU's memory for a chunk of logits and what is made of it; every chunk costs a pass over the head's gradient."""
HEAD_COPIES: Final = 3
"""Tensors as large as a chunk of logits that stand at once, in float32: logits, their log-softmax, its gradient."""


def chunk_elements_of(memory: float | None) -> int:
    """Logits that a chunk may have on a GPU with so many bytes, none on a CPU; a power of two, alike on cards alike."""
    if memory is None:
        return CHUNK_ELEMENTS
    return 1 << int(memory * CHUNK_SHARE / (4 * HEAD_COPIES)).bit_length() - 1


# ---- aggregation


class TokenMean(Settings):
    """Mean over all tokens of the batch (DAPO)."""

    kind: Literal["token"] = "token"


class SequenceMean(Settings):
    """Mean over completions of the mean over each one's tokens (GRPO); an episode is one completion."""

    kind: Literal["sequence"] = "sequence"


class ConstantMean(Settings):
    """Sum over tokens divided by the number of completions times a fixed length (Dr. GRPO); an episode is one."""

    kind: Literal["constant"] = "constant"
    length: Positive
    """The fixed length in tokens."""


Aggregation = Annotated[TokenMean | SequenceMean | ConstantMean, Field(discriminator="kind")]


# ---- losses


class PolicyLoss(Variant):
    """What all losses share. `implementation` is a `models.objectives.loss_inputs.LossFunction`."""

    compares_sequences: ClassVar[bool] = False
    """Whether its ratio is of a whole completion."""
    gradient_by_token: ClassVar[bool] = False
    """Whether a token's gradient depends on its own log-prob alone: then it is known before the pass ends, and the
    logits under a trained head are computed once, not again in the backward pass."""

    aggregation: Aggregation = TokenMean()
    """How token losses become one number."""

    def reasons_against(self, job: "Job") -> Iterator[str]:
        """Yield one line per combination that cannot work."""
        yield from ()


class PpoClip(PolicyLoss):
    """Clipped surrogate (PPO, arXiv 1707.06347) with separate bounds (clip-higher, DAPO, 2503.14476)."""

    implementation = "models.objectives.losses:ppo_clip"
    gradient_by_token = True

    kind: Literal["ppo_clip"] = "ppo_clip"
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Where the advantage is negative, the loss is at most -dual_clip x advantage (arXiv 1912.09729, eq. 5)."""

    def reasons_against(self, job: "Job") -> Iterator[str]:
        """Two bounds must not cross."""
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            yield (
                f"update.loss.dual_clip {self.dual_clip:g}: expected more than 1 + clip_high = {1 + self.clip_high:g}, "
                "or it would cut ratios that are not clipped"
            )


class Gspo(PolicyLoss):
    """Clipped ratio of whole sequences, exp(mean token log-ratio) (GSPO, arXiv 2507.18071, eq. 5 and 7)."""

    implementation = "models.objectives.losses:gspo"
    compares_sequences = True

    kind: Literal["gspo"] = "gspo"
    aggregation: Aggregation = SequenceMean()
    """How token losses become one number."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 3e-4
    """The ratio is clipped below 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0)] = 4e-4
    """The ratio is clipped above 1 + clip_high."""

    def reasons_against(self, job: "Job") -> Iterator[str]:
        """Bounds so narrow need ratios of one arithmetic."""
        if not job.update.correction.compares_with_trainer:
            yield (
                "update.loss.kind 'gspo' with correction.kind 'none': the engine's arithmetic differs by more than its "
                "bounds; use 'truncated' or 'masked', which compare with the trainer's own log-probs"
            )


class Cispo(PolicyLoss):
    """Log-prob times a clipped importance weight without gradient (CISPO, arXiv 2506.13585, eq. 4)."""

    implementation = "models.objectives.losses:cispo"
    gradient_by_token = True

    kind: Literal["cispo"] = "cispo"
    clip_low: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The weight is at least 1 - clip_low; at 1 it has no lower bound."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """The weight is at most 1 + clip_high."""


class PolicyGradient(PolicyLoss):
    """Log-prob times advantage (REINFORCE): nothing is clipped; take one minibatch, or correct by importance."""

    implementation = "models.objectives.losses:policy_gradient"
    gradient_by_token = True

    kind: Literal["policy_gradient"] = "policy_gradient"

    def reasons_against(self, job: "Job") -> Iterator[str]:
        """One step, since nothing holds a second one back."""
        for name in ("minibatches", "epochs"):
            if (found := getattr(job.update, name)) > 1:
                yield (
                    f"update.{name} {found} with loss.kind 'policy_gradient': nothing corrects for steps taken before, "
                    "use 1, or ppo_clip or cispo"
                )


class TargetLoss(Target):
    """A loss of your own: a subclass of `models.config.objectives.PolicyLoss` (see "Extending")."""


LossConfig = Annotated[PolicyLoss, OneOf((PpoClip, Gspo, Cispo, PolicyGradient, TargetLoss))]


# ---- divergence from the reference


class AdaptiveKl(Settings):
    """Controller of a KL coefficient (arXiv 1909.08593, section 2.2); its state is part of the run and resumes."""

    target: Annotated[float, Field(gt=0)]
    """Divergence aimed at, in nats per token."""
    horizon: Positive = 10_000
    """Completions in which an error of 1 changes the coefficient by about a factor of e; errors are cut at 0.2."""


class NoKl(Settings):
    """No penalty and no reference model."""

    kind: Literal["none"] = "none"


class KlPenalty(Settings):
    """Penalty on the divergence from the initial policy, in the loss."""

    kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the divergence per token."""
    coefficient: Annotated[float, Field(gt=0)] = 1e-3
    """Factor in the loss; the first one where it adapts."""
    adaptive: AdaptiveKl | None = None
    """What changes the coefficient from iteration to iteration; none keeps it."""


Kl = Annotated[NoKl | KlPenalty, Field(discriminator="kind")]


# ---- the mismatch between engine and trainer


class Correction(Variant):
    """What all corrections share. `implementation` is a `models.objectives.importance.CorrectionFunction`."""

    compares_with_trainer: ClassVar[bool] = True
    """Whether the loss compares with the trainer's own log-probs before the update."""


class NoCorrection(Correction):
    """Behaviour log-probs are taken as the old policy's; the mismatch is measured all the same, in the first step."""

    implementation = "models.objectives.importance:uncorrected"
    compares_with_trainer = False

    kind: Literal["none"] = "none"


class TruncatedImportance(Correction):
    """The loss is weighted by min(π_old / π_behaviour, cap).

    π_old is computed by the trainer. Steps after the first take the engine's log-probs for it where they are the same
    up to rounding: those of the transformers engine in float32, under an update in float32, if no token is stale.
    """

    implementation = "models.objectives.importance:truncated"

    kind: Literal["truncated"] = "truncated"
    cap: Annotated[float, Field(ge=1)] = 2.0
    """Largest weight."""


class MaskedImportance(Correction):
    """The loss is weighted by π_old / π_behaviour, and by 0 where that is outside a band."""

    implementation = "models.objectives.importance:masked"

    kind: Literal["masked"] = "masked"
    low: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Smallest weight that counts."""
    high: Annotated[float, Field(gt=1)] = 2.0
    """Largest weight that counts."""


CorrectionConfig = Annotated[NoCorrection | TruncatedImportance | MaskedImportance, Field(discriminator="kind")]


# ---- low-rank adapters


# ---- the update


class UpdateConfig(Settings):
    """The optimizer steps of an iteration."""

    optimizer: Annotated[OptimizerConfig, Since("0.1.0", before=AdamW())] = AdamW()
    """What makes steps of gradients, in warm-up and of critics and reward models too."""
    learning_rate: Annotated[float, Field(ge=0)] = 1e-6
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate over the run after its warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps of linear warm-up."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's first moment decay."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """AdamW's second moment decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are clipped to this global norm."""
    minibatches: Positive = 4
    """Optimizer steps per epoch; groups are dealt to them by the seed."""
    epochs: Annotated[Positive, Since("0.1.0", before=1)] = 1
    """Times that an iteration's samples are learnt from; minibatches stay the same and take turns in another order."""
    microbatch_tokens: Positive = 16384
    """Tokens (padding included) and patches of images per rank in one forward pass; gradients accumulate over a step's
    passes."""
    state_every: Annotated[Positive, Since("0.1.0", before=1)] = 1
    """Every n-th update keeps its optimizer's state; whoever resumes takes the updates since then again."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    """DeepSpeed ZeRO stage; a run goes on with another one if that is accepted."""
    sequence_parallel: Annotated[Positive, Since("0.1.0", before=1)] = 1
    """Consecutive ranks that read the same passes, each a slice of their tokens, and in attention some of the heads
    (DeepSpeed-Ulysses, arXiv 2309.14509): `microbatch_tokens` are those of all of them."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of weights and activations; optimizer moments and master weights are float32."""
    activation_checkpointing: bool | None = None
    """Have layers keep their inputs alone and compute the rest again in the backward pass: less memory, a third more
    time, the same gradients; unset, where a pass would keep more than 1 GiB otherwise, and more than weights, gradients
    and optimizer take."""
    offload: Annotated[Literal["none", "optimizer", "parameters"], Since("0.1.0", before="none")] = "none"
    """What lies in the machine's memory and not the GPU's while it is not needed: the optimizer's state with its steps
    (ZeRO 1 to 3), or the weights as well (ZeRO 3)."""
    attention: Annotated[Attention | None, Since("0.1.0", before=None)] = None
    """How attention is computed; unset is the model's own way, sdpa, or eager where its class needs that. Flash kernels
    take bfloat16 on GPUs and packages of their own (`flash-attn`, `flash-attn-3`); a reference, which is held in
    float32, keeps its own way beside them."""
    lora: LoraConfig | None = None
    """Train adapters; none trains every weight."""
    freeze: Annotated[tuple[Literal["vision", "projector", "language"], ...], Since("0.1.0", before=())] = ()
    """Parts of a policy that sees which stay as they are: its tower, what leads from there to the decoder, the decoder;
    warm-up on worked examples trains them all."""
    loss: LossConfig = PpoClip()
    """The policy loss."""
    router_loss: Annotated[Annotated[float, Field(gt=0)] | None, Since("0.1.0", before=None)] = None
    """Coefficient of the load-balancing loss of a mixture of experts (arXiv 2101.03961, eq. 4 to 6), the mean over its
    layers, of the learnt tokens of a whole optimizer step; counting what they choose takes one forward pass more. None:
    no such loss."""
    router_replay: Annotated[Literal["rollout"] | None, Since("0.1.0", before=None)] = None
    """Have the routers of a mixture of experts choose for each token the experts that were chosen when it was rolled
    out, or read there as part of a prompt (R3, arXiv 2510.11370), and weigh them by their own logits: wherever the
    policy that learns is asked, for its steps and for its log-probs before them. Reference, critic and teacher choose
    themselves. Rollouts and samples keep the choice. None: the policy chooses anew."""
    kl: Kl = NoKl()
    """Divergence from the initial policy."""
    correction: CorrectionConfig = TruncatedImportance()
    """What corrects the mismatch between the engine's log-probs and the trainer's."""
    stale_correction: CorrectionConfig | None = None
    """The same for tokens that an earlier policy version wrote; none treats them alike."""
    max_staleness: Annotated[int, Field(ge=0)] | None = None
    """Tokens written more versions ago have no weight in the loss; none keeps them all."""

    @model_validator(mode="after")
    def _routers_are_whole(self) -> "UpdateConfig":
        if self.router_loss is not None and self.zero_stage == 3:
            raise ValueError("router_loss and zero_stage 3: ranks hold parts of routers; use at most 2")
        if self.router_replay is not None and self.sequence_parallel > 1:
            raise ValueError("router_replay and sequence_parallel: what routers chose is of whole rows; leave one out")
        return self

    @model_validator(mode="after")
    def _trains_something(self) -> "UpdateConfig":
        if self.freeze and self.lora is not None:
            raise ValueError("freeze and lora: adapters leave all other weights as they are; remove freeze")
        least = {"none": 0, "optimizer": 1, "parameters": 3}[self.offload]
        if self.running_stage < least:
            raise ValueError(f"offload {self.offload!r} needs zero_stage {least} or more, found {self.zero_stage}")
        if len(set(self.freeze)) == 3:
            raise ValueError("freeze names vision, projector and language: nothing is left to train")
        return self

    def check_model(self, shape: ModelShape) -> None:
        """Raise BadInput if a key needs routers or parts that the policy does not have."""
        for key in ("router_loss", "router_replay"):
            if getattr(self, key) is not None and not shape.experts:
                raise BadInput(
                    f"update.{key}: expected a policy with experts and a router for them, found dense layers"
                )
        if self.router_replay is not None and not shape.replays_experts:
            raise BadInput(
                "update.router_replay: expected routers that choose by one call of topk, found a policy whose routers "
                "do something else; leave the key out"
            )
        if self.freeze and not shape.sees:
            raise BadInput(
                f"update.freeze {[*self.freeze]}: vision, projector and language are parts of vision-language "
                "policies, but this policy reads text only; remove update.freeze"
            )

    @property
    def steps(self) -> int:
        """Optimizer steps per iteration, where every minibatch has something to learn from."""
        return self.minibatches * self.epochs

    @property
    def running_stage(self) -> int:
        """The ZeRO stage that runs: in bfloat16 2 or 3, since DeepSpeed sums gradients in float32 only from 2 on."""
        return self.zero_stage if self.dtype == "float32" else max(2, self.zero_stage)

    @property
    def wide_attention(self) -> Attention | None:
        """How models that are held in float32 compute attention: flash kernels know no float32."""
        return None if self.attention in FLASH else self.attention

    @property
    def offloaded(self) -> tuple[str, ...]:
        """Parts of what a rank holds that lie in the machine's memory and not the GPU's."""
        return {"none": (), "optimizer": ("optimizer",), "parameters": ("optimizer", "weights")}[self.offload]

    @property
    def trains_sight(self) -> bool:
        """Whether tower or projector of a policy that sees are trained."""
        return self.lora is None and not {"vision", "projector"} <= {*self.freeze}

    @property
    def kl_penalty(self) -> KlPenalty | None:
        """The penalty in the loss, where there is one."""
        return self.kl if isinstance(self.kl, KlPenalty) else None
