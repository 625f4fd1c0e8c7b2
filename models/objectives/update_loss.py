"""The loss of one pass: policy loss, importance correction and KL penalty, with what there is to say about it.

Losses of tokens become one number by a weight per token, so that sums over ranks and passes need no more. The weights
are those of a whole minibatch, whatever part of it a rank or a forward pass holds. Shapes: N completion tokens of one
pass.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from models.config.objectives import Aggregation, ConstantMean, SequenceMean, TokenMean, UpdateConfig
from models.objectives.importance import Corrected, correct, k3, mismatch
from models.objectives.loss_inputs import LossInputs, LossOutputs, MetricSums
from models.objectives.losses import kl_estimate, policy_loss


def token_weights(aggregation: Aggregation, lengths: Sequence[int]) -> list[float]:
    """Weight of every token of each sequence, given the completion lengths of the whole minibatch.

    Sequences without a token count for nothing.
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
    logprobs_N: Tensor, tokens: LossInputs, *, config: UpdateConfig, kl_coefficient: float, tally: MetricSums
) -> Tensor:
    """This pass's share of the minibatch's loss."""
    old_N = logprobs_N.detach() if tokens.old_N is None else tokens.old_N
    corrected = correct(old_N, tokens.behaviour_N, staleness_N=tokens.staleness_N, config=config)
    terms = policy_loss(logprobs_N, corrected.old_N, tokens=tokens, config=config.loss)
    loss_N = terms.loss_N * corrected.weight_N
    if config.kl_penalty is not None:
        assert tokens.reference_N is not None, "a KL penalty needs the reference's log-probs"
        kl_N = kl_estimate(logprobs_N, tokens.reference_N, kind=config.kl_penalty.kind)
        loss_N = loss_N + kl_coefficient * kl_N
        tally.add({"kl": kl_N})
    shares_N = loss_N * tokens.weights_N
    finite_N = torch.isfinite(shares_N) & torch.isfinite(tokens.advantages_N)
    for read_N in (logprobs_N, old_N, tokens.behaviour_N, tokens.reference_N):  # a clamped ratio hides infinities
        if read_N is not None:
            finite_N = finite_N & torch.isfinite(read_N)
    tally.add({"loss": shares_N, "entropy": -logprobs_N, "not_finite": ~finite_N})
    _tally_terms(terms, logprobs_N.detach() - corrected.old_N, tally)
    _tally_correction(corrected, tokens, tally)
    return shares_N.sum()


def tally_mismatch(train_N: Tensor, tokens: LossInputs, *, tally: MetricSums) -> None:
    """Count the mismatch between what generated and the trainer before its first step.

    Tokens that an earlier version wrote are left out: there the difference would hold what was learnt since.
    """
    found, fresh_N = mismatch(train_N, tokens.behaviour_N), tokens.staleness_N == 0
    difference_N, weight_N, kl_N = (torch.where(fresh_N, values_N, 0.0) for values_N in found)
    tally.add(
        {
            "mismatch_difference_mean": difference_N,
            "mismatch_ratio_mean": weight_N,
            "mismatch_kl": kl_N,
            "mismatch_tokens": fresh_N,
        }
    )
    tally.raise_to({"mismatch_difference_max": difference_N, "mismatch_ratio_max": weight_N})


def _tally_terms(terms: LossOutputs, log_ratio_N: Tensor, tally: MetricSums) -> None:
    tally.add(
        {
            "clip_fraction_low": terms.clipped_low_N,
            "clip_fraction_high": terms.clipped_high_N,
            "ratio_mean": terms.ratio_N,
            "kl_old": k3(log_ratio_N),  # from the policy before the update
        }
    )
    if terms.dual_clipped_N is not None:
        tally.add({"dual_clip_fraction": terms.dual_clipped_N})
    tally.raise_to({"ratio_max": terms.ratio_N})


def _tally_correction(corrected: Corrected, tokens: LossInputs, tally: MetricSums) -> None:
    tally.add(
        {
            "importance_weight_mean": corrected.weight_N,
            "importance_truncated": corrected.truncated_N,
            "importance_masked": corrected.masked_N,
            "stale_fraction": tokens.staleness_N > 0,
            "too_stale_fraction": tokens.weights_N == 0,
        }
    )
