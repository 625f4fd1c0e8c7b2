"""Losses of preference pairs, for policies and reward models.

The loss of an optimizer step is the mean over its pairs. Quantities that depend on all pairs of the step are in
`PairStatistics`, so the contributions of all micro-batches and ranks only need to be added. Shapes: P pairs.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from rheostat.models.config.preference_losses import CpoLoss, DpoLoss, IpoLoss, KtoLoss, OrpoLoss, SimpoLoss


class PairScores(NamedTuple):
    """Scores of the chosen and the rejected completion of each pair: summed log-probs of a policy, or rewards of a
    reward model. If a single completion with a label takes the place of a pair, the other one has the score 0 and no
    tokens."""

    chosen_P: Tensor
    rejected_P: Tensor
    chosen_lengths_P: Tensor
    """Number of tokens of each chosen completion."""
    rejected_lengths_P: Tensor

    def divide_by_lengths(self) -> "PairScores":
        """Return a copy whose scores are divided by the numbers of tokens."""
        return self._replace(
            chosen_P=self.chosen_P / self.chosen_lengths_P, rejected_P=self.rejected_P / self.rejected_lengths_P
        )


class PairStatistics(NamedTuple):
    """Quantities that depend on all pairs of an optimizer step, or on all held-out pairs. They are the same on every
    rank."""

    chosen_tokens: float
    """Mean number of tokens of the chosen completions."""
    reference_point: Tensor | None = None
    """Estimate of the KL divergence between policy and reference in nats, without gradient. None if the loss does not
    use a reference point."""
    chosen_share: float = 1.0
    """Share of the pairs that have a chosen completion. It is below 1 if single completions with labels take the place
    of pairs."""
    rejected_share: float = 1.0
    """Share of the pairs that have a rejected completion."""


class PairTerms(NamedTuple):
    """Outputs of a loss for each preference pair."""

    loss_P: Tensor
    """Loss of each preference pair."""
    margins_P: Tensor
    """Reward of the chosen completion minus reward of the rejected completion. Losses of policies define implicit
    rewards."""
    right_P: Tensor
    """Whether the chosen completion has a higher reward than the rejected one."""
    extra_P: Mapping[str, Tensor] = {}
    """Other quantities of each pair, by metric name (`PreferenceLoss.extra_metrics`)."""


class PreferenceLossFunction(Protocol):
    """Pure function that computes one kind of loss for each preference pair. The loss has a gradient only with respect
    to the first argument."""

    def __call__(
        self,
        scores: PairScores,
        reference: PairScores | None,
        /,
        *,
        step: PairStatistics,
        config: Any,  # noqa: ANN401 -- the loss's own class
    ) -> PairTerms:
        """Return the loss of each pair. `scores` are the summed log-probs of completions under the policy, and
        `reference` those under the reference. `config` contains the settings of the loss."""
        ...


def dpo(scores: PairScores, reference: PairScores | None, /, *, step: PairStatistics, config: DpoLoss) -> PairTerms:
    """Return the DPO loss of each preference pair (arXiv 2305.18290, eq. 7).

    `label_smoothing` is the assumed share of pairs with swapped labels (conservative DPO, Mitchell, 2023). The implicit
    reward of a completion is beta · log(π / π_ref) (eq. 5, without the part that only depends on the prompt).
    """
    ratios = _compute_log_ratios(scores, reference)
    margins_P = config.beta * (ratios.chosen_P - ratios.rejected_P)
    return _build_terms(_smoothed_logistic_loss(margins_P, config.label_smoothing), margins_P)


def ipo(scores: PairScores, reference: PairScores | None, /, *, step: PairStatistics, config: IpoLoss) -> PairTerms:
    """Return the IPO loss of each preference pair, (h − 1 / (2 · tau))² (arXiv 2310.12036, eq. 17).

    The margin h is the difference of the log-ratios log(π / π_ref). Each log-ratio is divided by the number of tokens
    of its completion, as in TRL, whose authors confirmed this normalization with the authors of the paper.
    """
    ratios = _compute_log_ratios(scores, reference).divide_by_lengths()
    margins_P = ratios.chosen_P - ratios.rejected_P
    return _build_terms((margins_P - 1 / (2 * config.tau)).square(), margins_P)


def simpo(scores: PairScores, reference: PairScores | None, /, *, step: PairStatistics, config: SimpoLoss) -> PairTerms:
    """Return the SimPO loss of each preference pair (arXiv 2405.14734, eq. 6). The implicit reward of a completion is
    beta times the mean log-prob of its tokens (eq. 4)."""
    means = scores.divide_by_lengths()
    margins_P = config.beta * (means.chosen_P - means.rejected_P)
    return _build_terms(-functional.logsigmoid(margins_P - config.margin), margins_P)


def cpo(scores: PairScores, reference: PairScores | None, /, *, step: PairStatistics, config: CpoLoss) -> PairTerms:
    """Return the CPO loss of each preference pair: the DPO loss with a uniform reference, plus the cross-entropy of the
    chosen completion (arXiv 2401.08417, eq. 3 to 5).

    The mean of the cross-entropy over the pairs of a step is its mean over all tokens of chosen completions, as in the
    code of the authors. The formula in the paper is the sum over the tokens of a completion.
    """
    margins_P = config.beta * (scores.chosen_P - scores.rejected_P)
    nll_P = -scores.chosen_P / step.chosen_tokens
    loss_P = _smoothed_logistic_loss(margins_P, config.label_smoothing) + config.nll_weight * nll_P
    return _build_terms(loss_P, margins_P, nll=nll_P)


def orpo(scores: PairScores, reference: PairScores | None, /, *, step: PairStatistics, config: OrpoLoss) -> PairTerms:
    """Return the ORPO loss of each preference pair: the cross-entropy of the chosen completion, plus the logistic loss
    of the log odds ratio (arXiv 2403.07691, eq. 6 and 7).

    The probability of a completion is the geometric mean over its tokens (eq. 3), so the cross-entropy is the mean over
    the tokens of the completion. The margin is the log odds ratio.
    """
    means = scores.divide_by_lengths()
    margins_P = _compute_log_odds(means.chosen_P) - _compute_log_odds(means.rejected_P)
    loss_P = -means.chosen_P - config.weight * functional.logsigmoid(margins_P)
    return _build_terms(loss_P, margins_P, nll=-means.chosen_P)


def kto(scores: PairScores, reference: PairScores | None, /, *, step: PairStatistics, config: KtoLoss) -> PairTerms:
    """Return the KTO loss of each preference pair: the mean of the loss of the chosen completion as a desirable example
    and of the rejected one as an undesirable example (arXiv 2402.01306, eq. 7 and 8). If a single completion with a
    label takes the place of a pair, return the loss of this completion.

    A desirable completion with log-ratio r has the loss λ_D · (1 − σ(beta · (r − z₀))), and an undesirable one λ_U · (1
    − σ(beta · (z₀ − r))). z₀ is the reference point of the optimizer step, which has no gradient. The implicit reward
    of a completion is beta · r. The mean of the margins over a step is the mean reward of its desirable completions
    minus that of its undesirable ones.
    """
    assert step.reference_point is not None, "KTO needs the reference point of the optimizer step"
    ratios, point = _compute_log_ratios(scores, reference), step.reference_point
    desirable_P = config.desirable_weight * torch.sigmoid(config.beta * (point - ratios.chosen_P))
    undesirable_P = config.undesirable_weight * torch.sigmoid(config.beta * (ratios.rejected_P - point))
    has_chosen_P, has_rejected_P = ((each > 0).int() for each in (ratios.chosen_lengths_P, ratios.rejected_lengths_P))
    loss_P = (desirable_P * has_chosen_P + undesirable_P * has_rejected_P) / (has_chosen_P + has_rejected_P)
    rewards = [
        config.beta * ratio_P / share if share else torch.zeros_like(ratio_P)
        for ratio_P, share in ((ratios.chosen_P, step.chosen_share), (ratios.rejected_P, step.rejected_share))
    ]
    return _build_terms(
        loss_P,
        rewards[0] - rewards[1],
        reference_point=point.expand_as(loss_P),
        desirable_reward=rewards[0],
        undesirable_reward=rewards[1],
    )


def bradley_terry(scores: PairScores, *, centering: float) -> PairTerms:
    """Return the loss of a reward model for each preference pair: −log σ(r_chosen − r_rejected) (Bradley and Terry,
    1952) + centering · (r_chosen + r_rejected)².

    The first term does not change if a constant is added to all rewards. The second term keeps rewards around zero
    (arXiv 2312.09244, section 3).
    """
    margins_P = scores.chosen_P - scores.rejected_P
    loss_P = -functional.logsigmoid(margins_P) + centering * (scores.chosen_P + scores.rejected_P).square()
    return _build_terms(loss_P, margins_P)


def _compute_log_ratios(scores: PairScores, reference: PairScores | None) -> PairScores:
    """Return log(π / π_ref) of each completion."""
    assert reference is not None, "this loss compares the policy with a reference"
    return scores._replace(
        chosen_P=scores.chosen_P - reference.chosen_P, rejected_P=scores.rejected_P - reference.rejected_P
    )


def _compute_log_odds(means_P: Tensor) -> Tensor:
    """Return log(p / (1 − p)) of probabilities p (P), which are given as log p. Probabilities that round to 1 are
    lowered by the rounding error of the floating-point type, so that the result is finite."""
    below_P = means_P.clamp(max=-torch.finfo(means_P.dtype).eps)
    return means_P - torch.log(-torch.expm1(below_P))


def _smoothed_logistic_loss(margins_P: Tensor, label_smoothing: float) -> Tensor:
    """Return the logistic loss of margins (P). The share `label_smoothing` is assumed to have the wrong sign."""
    return -(1 - label_smoothing) * functional.logsigmoid(margins_P) - label_smoothing * functional.logsigmoid(
        -margins_P
    )


def _build_terms(loss_P: Tensor, margins_P: Tensor, **extra_P: Tensor) -> PairTerms:
    margins_P = margins_P.detach()
    return PairTerms(loss_P, margins_P, margins_P > 0, {name: value_P.detach() for name, value_P in extra_P.items()})
