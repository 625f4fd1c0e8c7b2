"""Losses of critics, estimators of KL(policy ‖ reference), and the total loss of a micro-batch.

The loss of a minibatch is a weighted sum of token losses. The weights depend on the whole minibatch and not on its
division into ranks and micro-batches, so the contributions of all micro-batches only need to be added.

Shapes: N completion tokens of one micro-batch, from any number of sequences; B sequences.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.policy_losses import (
    Aggregation,
    ConstantMean,
    SequenceMean,
    TokenMean,
)
from rheostat.models.objectives.importance import Corrected, correct, k3, mismatch
from rheostat.models.objectives.loss_inputs import LossInputs, LossOutputs, MetricSums
from rheostat.models.objectives.policy_losses import policy_loss

ROUNDING = 1e-12
"""Assumed relative rounding error of a mean of squares, if the mean is computed from float64 sums over a few million
numbers."""


class ValueTerms(NamedTuple):
    """Outputs of the critic's loss for each token."""

    loss_N: Tensor
    """Loss of each token."""
    clipped_N: Tensor
    """Whether the gradient of each value is 0, because the value moved further than `clip` from its old value."""


def value_loss(values_N: Tensor, *, old_N: Tensor, returns_N: Tensor, clip: float) -> ValueTerms:
    """Return half the larger of two squared errors per token: the error of the value, and the error of the value
    clipped to `old_N` ± `clip`. The error is the difference from the return.

    This is the loss of OpenAI's baselines (ppo2). The PPO paper (arXiv 1707.06347, eq. 9) does not clip values.
    """
    near_old_N = old_N + (values_N - old_N).clamp(-clip, clip)
    plain_N, clipped_N = (values_N - returns_N).square(), (near_old_N - returns_N).square()
    return ValueTerms(loss_N=torch.maximum(plain_N, clipped_N) / 2, clipped_N=(clipped_N > plain_N).detach())


def fit_sums(values_N: Tensor, returns_N: Tensor) -> dict[str, Tensor]:
    """Return tensors with one element per token. Their sums over micro-batches and ranks are the input of
    `explained_variance`."""
    returns, errors = returns_N.detach().double(), (returns_N - values_N).detach().double()
    return {
        "fit_tokens": torch.ones_like(returns),
        "fit_returns": returns,
        "fit_returns_squared": returns.square(),
        "fit_errors": errors,
        "fit_errors_squared": errors.square(),
    }


def explained_variance(sums: Mapping[str, float]) -> float:
    """Return 1 − Var(return − value) / Var(return), or 0 if all returns are equal.

    `sums` contains the sums of the tensors of `fit_sums` by name. The result is 1 for a perfect prediction, and 0 if
    the prediction is no better than a constant.
    """
    count = sums["fit_tokens"]
    variance = _variance(count, sums["fit_returns"], sums["fit_returns_squared"])
    unexplained = _variance(count, sums["fit_errors"], sums["fit_errors_squared"])
    return 1 - unexplained / variance if variance else 0.0


def _variance(count: float, total: float, squares: float) -> float:
    """Return the variance of `count` numbers, given their sum (`total`) and the sum of their squares. Returns 0 if the
    variance is smaller than the rounding error of these sums."""
    variance = squares / count - (total / count) ** 2 if count else 0.0
    return variance if count and variance > ROUNDING * squares / count else 0.0


def kl_estimate(logprobs_N: Tensor, reference_N: Tensor, *, kind: Literal["k1", "k2", "k3"]) -> Tensor:
    """Return an estimate of the KL divergence from the reference at each token (N).

    Kind k1 is unbiased and may be negative. Kind k2 is biased and has a low variance. Kind k3 is unbiased and never
    negative. In a loss on samples of the policy itself, k2 has the gradient of the true divergence, whereas the
    gradient of k1 is 0 on average.
    """
    log_ratio_N = logprobs_N - reference_N
    match kind:
        case "k1":
            return log_ratio_N
        case "k2":
            return log_ratio_N.square() / 2
        case "k3":
            return k3(-log_ratio_N)


def token_weights(aggregation: Aggregation, lengths: Sequence[int]) -> list[float]:
    """Return the weight in the loss that every token of a completion has, for each completion of a minibatch. `lengths`
    contains the number of tokens of each completion.

    An episode is one completion, even if its turns are stored as several samples. Completions without tokens do not
    increase the number of completions by which a mean is divided.
    """
    num_sequences = sum(length > 0 for length in lengths)
    match aggregation:
        case TokenMean():
            return [1 / max(1, sum(lengths))] * len(lengths)
        case SequenceMean():
            return [1 / (num_sequences * length) if length else 0.0 for length in lengths]
        case ConstantMean(length=constant):
            return [1 / (max(1, num_sequences) * constant)] * len(lengths)


def update_loss(
    logprobs_N: Tensor,
    tokens: LossInputs,
    *,
    config: UpdateConfig,
    kl_coefficient: float,
    tally: MetricSums,
    entropies_N: Tensor | None = None,
) -> Tensor:
    """Return the contribution of one micro-batch to the loss of its minibatch, including importance correction, KL
    penalty, entropy bonus, divergence from a teacher and negative log-likelihood of correct completions. `entropies_N`
    are the entropies over the vocabulary, which only the bonus needs.

    Metrics are added to `tally`. They cover only tokens with a weight in the loss, except `not_finite`, which covers
    all tokens.
    """
    trained_N = tokens.weights_N != 0
    old_N = logprobs_N.detach() if tokens.old_N is None else tokens.old_N
    corrected = correct(old_N, tokens, config=config)
    terms = policy_loss(logprobs_N, corrected.old_N, tokens=tokens, config=config.loss)
    loss_N = terms.loss_N * corrected.weight_N
    if tokens.low_entropy_N is not None:
        loss_N = loss_N.masked_fill(tokens.low_entropy_N, 0.0)
        tally.add(_zero_untrained(trained_N, {"low_entropy_fraction": tokens.low_entropy_N}))
    if config.kl_penalty is not None:
        kl_N = tokens.kl_N
        if kl_N is None:
            assert tokens.reference_N is not None, "a KL penalty needs the log-probs of the reference model"
            kl_N = kl_estimate(logprobs_N, tokens.reference_N, kind=config.kl_penalty.kind)
        loss_N = loss_N + kl_coefficient * kl_N
        tally.add(_zero_untrained(trained_N, {"kl": kl_N}))
    if config.entropy is not None:
        assert entropies_N is not None, "an entropy bonus needs the entropies"
        loss_N = loss_N - config.entropy.coefficient * entropies_N
        tally.add(_zero_untrained(trained_N, {"full_entropy": entropies_N}))
    if tokens.teacher_N is not None:
        loss_N = loss_N + tokens.teacher_coefficient * tokens.teacher_N
        tally.add(_zero_untrained(trained_N, {"teacher_divergence": tokens.teacher_N}))
    shares_N = loss_N * tokens.weights_N
    if config.positive_nll is not None:
        assert tokens.positive_weights_N is not None, "the likelihood of correct completions needs their weights"
        shares_N = shares_N - config.positive_nll.coefficient * tokens.positive_weights_N * logprobs_N
        positive_N = tokens.positive_weights_N != 0
        tally.add({"positive_fraction": positive_N, "positive_nll": torch.where(positive_N, -logprobs_N, 0.0)})
    finite_N = torch.isfinite(shares_N) & torch.isfinite(tokens.advantages_N)
    for read_N in (logprobs_N, old_N, tokens.behavior_N, tokens.reference_N):  # a clamped ratio would hide infinities
        if read_N is not None:
            finite_N = finite_N & torch.isfinite(read_N)
    tally.add({"loss": shares_N, "trained_tokens": trained_N, "not_finite": ~finite_N})
    tally.add(_zero_untrained(trained_N, {"entropy": -logprobs_N}))
    if tokens.selected_N is not None:
        tally.add(_zero_untrained(trained_N, {"selected_fraction": tokens.selected_N}))
    _tally_terms(terms, logprobs_N.detach() - corrected.old_N, trained_N, tally)
    _tally_correction(corrected, trained_N, tally)
    return shares_N.sum()


def _zero_untrained(trained_N: Tensor, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the metric values in which tokens without weight in the loss have 0. `trained_N` is the mask of
    tokens with a weight."""
    return {name: torch.where(trained_N, value.detach(), torch.zeros_like(value)) for name, value in values.items()}


def tally_mismatch(train_N: Tensor, tokens: LossInputs, *, has_same_weights: bool = True, tally: MetricSums) -> None:
    """Add metrics of the difference between the engine's and the trainer's log-probs, measured before the first
    optimizer step.

    `train_N` are the trainer's log-probs. Tokens of earlier policy versions are excluded, because their difference
    would also include changes of the weights. All tokens are excluded unless `has_same_weights` is set.
    """
    tallies, fresh_N = mismatch(train_N, tokens.behavior_N), (tokens.staleness_N == 0) & has_same_weights
    difference_N, weight_N, kl_N = (torch.where(fresh_N, values_N, 0.0) for values_N in tallies)
    tally.add(
        {
            "mismatch_difference_mean": difference_N,
            "mismatch_ratio_mean": weight_N,
            "mismatch_kl": kl_N,
            "mismatch_tokens": fresh_N,
        }
    )
    tally.raise_to({"mismatch_difference_max": difference_N, "mismatch_ratio_max": weight_N})


_MAX_LOG_WEIGHT: Final = 300.0
"""Limit of a sample's log importance weight. The square of the weight is then finite in float64. There is no lower
limit: many samples with the same small weight would overstate the effective sample size."""


def tally_behavior(train_N: Tensor, tokens: LossInputs, *, tally: MetricSums) -> None:
    """Add the sums from which `summarize_behavior` computes how far the policy before the update is from the policies
    that generated the samples.

    `train_N` are the trainer's log-probs before the first optimizer step. In contrast to `tally_mismatch`, tokens of
    earlier policy versions are included. The importance weight of a sample is the product of the ratios of its tokens.
    """
    log_ratio_N, has_tokens_B = train_N - tokens.behavior_N, tokens.lengths_B > 0
    sums_B = torch.segment_reduce(log_ratio_N.double(), "sum", lengths=tokens.lengths_B, unsafe=True)
    weight_B = torch.where(has_tokens_B, sums_B.clamp(max=_MAX_LOG_WEIGHT).exp(), 0.0)
    tally.add(
        {
            "behavior_samples": has_tokens_B,
            "behavior_weight": weight_B,
            "behavior_weight_square": weight_B.square(),
            "behavior_tokens": torch.ones_like(log_ratio_N),
            "behavior_kl": k3(log_ratio_N),
        }
    )


def summarize_behavior(sums: Mapping[str, float]) -> dict[str, float]:
    """Return two metrics from the sums of `tally_behavior`, which are given by name: the estimated KL divergence per
    token, and the effective sample size as a share of the n samples, (Σ w)² / (n · Σ w²) (Kong, 1992).

    The effective sample size is 1 if all importance weights w are equal, 1/n if one of them is far above all others,
    and 0 if there are no samples or all weights are below the range of float64.
    """
    squares = sums["behavior_samples"] * sums["behavior_weight_square"]
    return {
        "behavior_kl": sums["behavior_kl"] / max(1.0, sums["behavior_tokens"]),
        "effective_sample_size": sums["behavior_weight"] ** 2 / squares if squares else 0.0,
    }


def _tally_terms(terms: LossOutputs, log_ratio_N: Tensor, trained_N: Tensor, tally: MetricSums) -> None:
    values = {
        "clip_fraction_low": terms.clipped_low_N,
        "clip_fraction_high": terms.clipped_high_N,
        "ratio_mean": terms.ratio_N,
        "kl_old": k3(log_ratio_N),  # from the policy before the update
    }
    if terms.dual_clipped_N is not None:
        values["dual_clip_fraction"] = terms.dual_clipped_N
    tally.add(_zero_untrained(trained_N, values))
    tally.raise_to(_zero_untrained(trained_N, {"ratio_max": terms.ratio_N}))


def _tally_correction(corrected: Corrected, trained_N: Tensor, tally: MetricSums) -> None:
    values = {
        "importance_weight_mean": corrected.weight_N,
        "importance_truncated": corrected.truncated_N,
        "importance_masked": corrected.masked_N,
    }
    tally.add(_zero_untrained(trained_N, values))
