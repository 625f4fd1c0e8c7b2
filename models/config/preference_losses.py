"""Configuration of the losses that train a policy on preference pairs. Torch-free."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rheostat.infra.variants import Variant

Strength = Annotated[float, Field(gt=0)]
"""Factor that must be positive."""
LabelSmoothing = Annotated[float, Field(ge=0, lt=0.5)]
"""Assumed probability that the preference of a pair is labeled wrongly."""


class PreferenceLoss(Variant):
    """Fields common to all losses on preference pairs. `implementation` names a
    `rheostat.models.objectives.preferences.PreferenceLossFunction`."""

    uses_reference: ClassVar[bool] = False
    """Whether the loss compares the policy with a reference, which is the policy before the training."""
    uses_reference_point: ClassVar[bool] = False
    """Whether the loss needs the reference point of its optimizer step, an estimate of the KL divergence from the
    reference. Only losses with a reference can need one."""
    accepts_labels: ClassVar[bool] = False
    """Whether the loss rates each completion separately, so that completions with labels can take the place of
    pairs."""
    extra_metrics: ClassVar[tuple[str, ...]] = ()
    """Names of the metrics of this loss in addition to loss, accuracy and margin."""


class DpoLoss(PreferenceLoss):
    """Logistic loss of the difference of implicit rewards (DPO, arXiv 2305.18290, eq. 7)."""

    implementation = "rheostat.models.objectives.preferences:dpo"
    uses_reference = True

    kind: Literal["dpo"] = "dpo"
    beta: Strength = 0.1
    """Strength of the KL constraint, β in the paper. Larger values keep the policy closer to the reference."""
    label_smoothing: LabelSmoothing = 0.0
    """Probability with which the preference of a pair is assumed to be labeled wrongly (conservative DPO)."""


class IpoLoss(PreferenceLoss):
    """Squared distance of the margin from a target (IPO, arXiv 2310.12036, eq. 17). The margin is the difference of the
    mean log-ratios per token."""

    implementation = "rheostat.models.objectives.preferences:ipo"
    uses_reference = True

    kind: Literal["ipo"] = "ipo"
    tau: Strength = 0.1
    """Strength of the regularization, τ in the paper. The target of the margin is 1 / (2 · tau), in nats per token."""


class SimpoLoss(PreferenceLoss):
    """Logistic loss of mean log-probs with a target margin, without a reference (SimPO, arXiv 2405.14734, eq. 6)."""

    implementation = "rheostat.models.objectives.preferences:simpo"

    kind: Literal["simpo"] = "simpo"
    beta: Strength = 2.0
    """Factor of the difference of the mean log-probs per token, β in the paper."""
    margin: Annotated[float, Field(ge=0)] = 1.0
    """Target of the difference between the rewards of the two completions, γ in the paper."""


class CpoLoss(PreferenceLoss):
    """Logistic loss of log-probs without a reference, plus the cross-entropy of the chosen completion (CPO, arXiv
    2401.08417, eq. 3 to 5)."""

    implementation = "rheostat.models.objectives.preferences:cpo"
    extra_metrics = ("nll",)

    kind: Literal["cpo"] = "cpo"
    beta: Strength = 0.1
    """Factor of the difference of the log-probs, β in the paper."""
    label_smoothing: LabelSmoothing = 0.0
    """Probability with which the preference of a pair is assumed to be labeled wrongly."""
    nll_weight: Annotated[float, Field(ge=0)] = 1.0
    """Factor of the cross-entropy of the chosen completions, which is the mean over all their tokens in the optimizer
    step."""


class OrpoLoss(PreferenceLoss):
    """Cross-entropy of the chosen completion plus the logistic loss of an odds ratio, without a reference (ORPO, arXiv
    2403.07691, eq. 6 and 7)."""

    implementation = "rheostat.models.objectives.preferences:orpo"
    extra_metrics = ("nll",)

    kind: Literal["orpo"] = "orpo"
    weight: Annotated[float, Field(ge=0)] = 0.1
    """Factor of the loss of the odds ratio, λ in the paper."""


class KtoLoss(PreferenceLoss):
    """Distance of implicit rewards from a reference point, for desirable and undesirable completions (KTO, arXiv
    2402.01306, eq. 7 and 8). The completions have labels (`preferences.kind = "labels"`), or chosen completions of
    pairs are desirable and rejected ones undesirable."""

    implementation = "rheostat.models.objectives.preferences:kto"
    uses_reference = True
    uses_reference_point = True
    accepts_labels = True
    extra_metrics = ("reference_point", "desirable_reward", "undesirable_reward")

    kind: Literal["kto"] = "kto"
    beta: Strength = 0.1
    """Factor of log-ratio minus reference point, β in the paper."""
    desirable_weight: Strength = 1.0
    """Factor of the loss of desirable completions, λ_D in the paper."""
    undesirable_weight: Strength = 1.0
    """Factor of the loss of undesirable completions, λ_U in the paper."""


PreferenceLossConfig = Annotated[
    DpoLoss | IpoLoss | SimpoLoss | CpoLoss | OrpoLoss | KtoLoss, Field(discriminator="kind")
]
