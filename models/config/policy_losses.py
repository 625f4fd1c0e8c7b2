"""Configuration of the policy losses and of how the losses of tokens are aggregated. Torch-free."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from rheostat.infra.config import Positive, Settings
from rheostat.infra.variants import OneOf, Target, Variant
from rheostat.models.config.job import Job


# ---- aggregation
class TokenMean(Settings):
    """Mean of the loss over all tokens of the batch (DAPO), so long completions have more weight than short ones."""

    kind: Literal["token"] = "token"


class SequenceMean(Settings):
    """Mean loss per token of each completion, averaged over completions (GRPO). An episode counts as one completion."""

    kind: Literal["sequence"] = "sequence"


class ConstantMean(Settings):
    """Sum of the token losses, divided by completions x a fixed length (Dr. GRPO). An episode counts as one
    completion."""

    kind: Literal["constant"] = "constant"
    length: Positive
    """Fixed length in tokens by which the sum is divided."""


Aggregation = Annotated[TokenMean | SequenceMean | ConstantMean, Field(discriminator="kind")]


# ---- losses
class PolicyLoss(Variant):
    """Fields common to all policy losses. `implementation` names a
    `rheostat.models.objectives.loss_inputs.LossFunction`."""

    checks = {"policy": "rheostat.models.inspection.training:check_loss"}
    compares_sequences: ClassVar[bool] = False
    """Whether the loss of a token depends on the probability ratios of the whole completion."""
    gradient_by_token: ClassVar[bool] = False
    """Whether the gradient of a token's loss depends only on this token's log-prob. If so, the backward pass reuses the
    logits and does not compute them again."""

    selection: ClassVar[str | None] = None
    """Function (`module:name`) that selects tokens of each minibatch before the first optimizer step: a
    `rheostat.models.objectives.selection.SelectionFunction`. The loss receives the mask of the selected tokens as
    `tokens.selected_N`. None if the loss selects no tokens."""
    needs_tokens: ClassVar[bool] = False
    """Whether the loss is defined only for log-probs of text tokens, and not for those of denoising steps."""
    corrects_importance: ClassVar[bool] = False
    """Whether the loss itself corrects for the difference from the policy that generated the tokens, so that no
    importance correction may be configured."""
    uses_forward_process: ClassVar[bool] = False
    """Whether the loss needs no log-probs, but the velocities that a text-to-image policy predicts for its generated
    pictures with new noise. `implementation` then names a
    `rheostat.models.objectives.forward_process.ForwardProcessLoss`."""

    aggregation: Aggregation = TokenMean()
    """Method that combines the losses of all tokens into one number."""

    def find_conflicts(self, job: Job) -> Iterator[str]:
        """Yield one message for each setting of the job with which this loss cannot be combined."""
        yield from ()


class PpoClip(PolicyLoss):
    """Clipped surrogate loss (PPO, arXiv 1707.06347) with separate bounds above and below 1 (clip-higher, DAPO,
    2503.14476)."""

    implementation = "rheostat.models.objectives.policy_losses:ppo_clip"
    gradient_by_token = True

    kind: Literal["ppo_clip"] = "ppo_clip"
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Distance of the lower bound from 1: probability ratios below 1 - clip_low are clipped."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """Distance of the upper bound from 1: probability ratios above 1 + clip_high are clipped."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Factor c (dual clip, arXiv 1912.09729, eq. 5): the loss of a token with negative advantage is at most c x
    |advantage|. If not set, this loss has no upper bound."""

    def find_conflicts(self, job: Job) -> Iterator[str]:
        """Yield a message if `dual_clip` is not larger than 1 + clip_high."""
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            yield (
                f"update.loss.dual_clip is {self.dual_clip:g}, but it must be more than 1 + clip_high = "
                f"{1 + self.clip_high:g}, or it would affect ratios that are not clipped. Raise it"
            )


class Gspo(PolicyLoss):
    """Clipped probability ratio of whole sequences, exp(mean token log-ratio) (GSPO, arXiv 2507.18071, eq. 5 and 7)."""

    implementation = "rheostat.models.objectives.policy_losses:gspo"
    compares_sequences = True

    kind: Literal["gspo"] = "gspo"
    aggregation: Aggregation = SequenceMean()
    """Method that combines the token losses into one number."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 3e-4
    """Distance of the lower bound from 1: sequence ratios below 1 - clip_low are clipped."""
    clip_high: Annotated[float, Field(gt=0)] = 4e-4
    """Distance of the upper bound from 1: sequence ratios above 1 + clip_high are clipped."""

    def find_conflicts(self, job: Job) -> Iterator[str]:
        """Yield a message if the old log-probs come from the engine, because its rounding errors exceed the narrow clip
        range."""
        if not job.update.correction.compares_with_trainer:
            yield (
                "update.loss.kind = 'gspo' cannot be combined with update.correction.kind = 'none': log-probs of "
                "engine and trainer differ by more than the bounds of this loss. Use 'truncated' or 'masked'"
            )


class Cispo(PolicyLoss):
    """Log-prob x advantage, weighted by a clipped importance weight without gradient (CISPO, arXiv 2506.13585, eq.
    4)."""

    implementation = "rheostat.models.objectives.policy_losses:cispo"
    gradient_by_token = True

    kind: Literal["cispo"] = "cispo"
    clip_low: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Distance of the importance weight's lower bound from 1: the bound is 1 - clip_low. With 1 it has no effect."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """Distance of the importance weight's upper bound from 1: the bound is 1 + clip_high."""


class PolicyGradient(PolicyLoss):
    """Log-prob times advantage (REINFORCE) without clipping. Use only one optimizer step per iteration."""

    implementation = "rheostat.models.objectives.policy_losses:policy_gradient"
    gradient_by_token = True

    kind: Literal["policy_gradient"] = "policy_gradient"

    def find_conflicts(self, job: Job) -> Iterator[str]:
        """Yield a message if an iteration has several optimizer steps, because this loss does not correct for earlier
        steps."""
        for name in ("minibatches", "epochs"):
            if (count := getattr(job.update, name)) > 1:
                yield (
                    f"update.{name} is {count}, but update.loss.kind = 'policy_gradient' does not correct for earlier "
                    "steps of an iteration. Set it to 1, or use the loss 'ppo_clip' or 'cispo'"
                )


class Sapo(PolicyLoss):
    """Sigmoid of the probability ratio as a soft gate instead of clipping (SAPO, arXiv 2511.20347)."""

    implementation = "rheostat.models.objectives.policy_losses:sapo"
    gradient_by_token = True

    kind: Literal["sapo"] = "sapo"
    aggregation: Aggregation = SequenceMean()
    """Method that combines the token losses into one number."""
    positive_temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature τ of the gate for tokens with a positive advantage. The gradient fades faster if it is higher."""
    negative_temperature: Annotated[float, Field(gt=0)] = 1.05
    """Temperature τ of the gate for all other tokens. The paper uses a higher temperature here, because the gradients
    of these tokens are less stable."""


class Gmpo(PolicyLoss):
    """Geometric mean of the clipped probability ratios of a sequence's tokens (GMPO, arXiv 2507.20673)."""

    implementation = "rheostat.models.objectives.policy_losses:gmpo"
    compares_sequences = True

    kind: Literal["gmpo"] = "gmpo"
    aggregation: Aggregation = SequenceMean()
    """Method that combines the token losses into one number."""
    clip_low: Annotated[float, Field(gt=0)] = 0.4
    """Lower bound of the log-ratios: those of tokens with a negative advantage are raised to -clip_low (in nats)."""
    clip_high: Annotated[float, Field(gt=0)] = 0.4
    """Upper bound of the log-ratios: those of tokens with a positive advantage are lowered to clip_high (in nats)."""


class Vespo(PolicyLoss):
    """Log-prob x advantage, weighted by W^power · exp(decay · (1 - W)) without gradient, where W is the probability
    ratio of the whole sequence to the engine's policy, the product over its tokens (VESPO, arXiv 2602.10693).

    The weight is 1 at W = 1 and fades smoothly for sequences that are far from the engine's policy.
    """

    implementation = "rheostat.models.objectives.policy_losses:vespo"
    compares_sequences = True
    corrects_importance = True

    kind: Literal["vespo"] = "vespo"
    positive_power: Annotated[float, Field(ge=0)] = 2.0
    """Power of W for tokens with an advantage of 0 or more."""
    positive_decay: Annotated[float, Field(gt=0)] = 3.0
    """Decay rate of the weight for tokens with an advantage of 0 or more."""
    negative_power: Annotated[float, Field(ge=0)] = 3.0
    """Power of W for tokens with a negative advantage."""
    negative_decay: Annotated[float, Field(gt=0)] = 2.0
    """Decay rate of the weight for tokens with a negative advantage."""

    def find_conflicts(self, job: Job) -> Iterator[str]:
        """Yield a message if an importance correction is configured, because the weight of this loss already corrects
        for the engine's policy."""
        if any(correction.compares_with_trainer for correction in job.update.corrections):
            yield (
                "update.loss.kind = 'vespo' cannot be combined with an importance correction, because the weight of "
                "this loss already corrects for the engine's policy. Set update.correction.kind = 'none', and remove "
                "update.stale_correction"
            )


class ClipCov(PolicyLoss):
    """Loss of `ppo_clip` without the gradient of some tokens, which are sampled among those that reduce the entropy of
    the policy most (Clip-Cov, arXiv 2505.22617).

    The entropy falls with the covariance of log-prob and advantage. The covariance is computed over the whole minibatch
    from the log-probs that the engine recorded. The paper uses the current log-probs of each micro-batch.
    """

    implementation = "rheostat.models.objectives.policy_losses:clip_cov"
    selection = "rheostat.models.objectives.selection:select_randomly"
    gradient_by_token = True
    needs_tokens = True

    kind: Literal["clip_cov"] = "clip_cov"
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Distance of the lower bound from 1: probability ratios below 1 - clip_low are clipped."""
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    """Distance of the upper bound from 1: probability ratios above 1 + clip_high are clipped."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 2e-4
    """Fraction of the tokens of a minibatch that have no gradient, but at least one token. If fewer tokens have a
    covariance between the two bounds, only these."""
    covariance_low: float = 1.0
    """Lower bound of the covariance of the sampled tokens."""
    covariance_high: float = 5.0
    """Upper bound of the covariance of the sampled tokens."""

    @model_validator(mode="after")
    def _check_bounds(self) -> "ClipCov":
        if self.covariance_low >= self.covariance_high:
            raise ValueError(
                f"covariance_low is {self.covariance_low:g}, but it must be less than covariance_high, which is "
                f"{self.covariance_high:g}. Lower it"
            )
        return self


class KlCov(PolicyLoss):
    """Unclipped loss with a penalty on the change of the tokens that reduce the entropy of the policy most (KL-Cov,
    arXiv 2505.22617): the tokens with the largest covariance of log-prob and advantage. The covariance is computed as
    for `clip_cov`."""

    implementation = "rheostat.models.objectives.policy_losses:kl_cov"
    selection = "rheostat.models.objectives.selection:select_largest"
    gradient_by_token = True
    needs_tokens = True

    kind: Literal["kl_cov"] = "kl_cov"
    fraction: Annotated[float, Field(gt=0, le=1)] = 2e-4
    """Fraction of the tokens of a minibatch that are penalized, but at least one token of each minibatch."""
    coefficient: Annotated[float, Field(gt=0)] = 1.0
    """Factor of the penalty |log π - log π_old| in the loss of these tokens."""


class Dppo(PolicyLoss):
    """Loss without clipping, masked where the policy is too far from the engine's policy (DPPO, arXiv 2602.04879).

    The distance of a token is a divergence between the two policies, reduced to two outcomes: the token, and all other
    tokens. A token is masked only if its advantage moves its probability further away.
    """

    implementation = "rheostat.models.objectives.policy_losses:dppo"
    gradient_by_token = True
    needs_tokens = True

    kind: Literal["dppo"] = "dppo"
    divergence: Literal["tv", "kl"] = "tv"
    """Divergence of the engine's policy μ and the current policy π: "tv" is the total variation |π - μ|, and "kl" is
    KL(μ ‖ π) in nats."""
    threshold: Annotated[float, Field(gt=0)] | None = None
    """Largest divergence with which a token is trained in any direction. If not set, it is 0.15 for "tv" and 0.05 for
    "kl", the values of the authors' examples."""

    @property
    def max_divergence(self) -> float:
        """Divergence above which a token is masked."""
        return self.threshold or {"tv": 0.15, "kl": 0.05}[self.divergence]


class DiffusionNft(PolicyLoss):
    """Flow matching towards generated pictures with a high reward and away from those with a low one (DiffusionNFT,
    arXiv 2509.16117), for text-to-image policies that predict velocities.

    Noise is added to each finished picture at the noise levels of the denoising steps. The loss needs no log-probs, so
    pictures are generated without noise in the steps, with `rollout.denoising.sampler.kind = "ode"`.
    """

    implementation = "rheostat.models.objectives.forward_process:diffusion_nft"
    uses_forward_process = True

    kind: Literal["diffusion_nft"] = "diffusion_nft"
    beta: Annotated[float, Field(gt=0)] = 1.0
    """β in the paper: v⁺ and v⁻ are v_old plus and minus β · (v − v_old). A smaller β allows larger updates."""
    advantage_clip: Annotated[float, Field(gt=0)] = 5.0
    """Advantage at which the loss uses only the positive part. At minus this advantage, it uses only the negative part.
    The weight r of the positive part is 1/2 + advantage / (2 x advantage_clip), limited to 0 and 1."""


class TargetLoss(Target):
    """User-defined loss: a subclass of `rheostat.models.config.policy_losses.PolicyLoss` (see "Extending" in the
    documentation)."""


LossConfig = Annotated[
    PolicyLoss,
    OneOf((PpoClip, Gspo, Cispo, PolicyGradient, Sapo, Gmpo, Vespo, ClipCov, KlCov, Dppo, DiffusionNft, TargetLoss)),
]
