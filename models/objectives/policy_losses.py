"""Policy losses: the loss of each completion token, computed from log-probs and advantages.

Log-ratios are clamped at ±20 before they are exponentiated (`exp_ratio`), so every ratio is finite. Shapes: N
completion tokens of one micro-batch, from any number of sequences; B sequences.
"""

from typing import cast

import torch
from torch import Tensor

from rheostat.infra.variants import implementation_of
from rheostat.models.config.objectives import MAX_LOG_RATIO
from rheostat.models.config.policy_losses import (
    Cispo,
    ClipCov,
    Dppo,
    Gmpo,
    Gspo,
    KlCov,
    PolicyGradient,
    PolicyLoss,
    PpoClip,
    Sapo,
    Vespo,
)
from rheostat.models.objectives.importance import exp_ratio
from rheostat.models.objectives.loss_inputs import LossFunction, LossInputs, LossOutputs


def ppo_clip(logprobs_N: Tensor, old_N: Tensor, *, tokens: LossInputs, config: PpoClip) -> LossOutputs:
    """Return the larger of the unclipped and the clipped loss of each token (PPO, arXiv 1707.06347, eq. 7, with
    separate lower and upper bounds as in DAPO).

    If configured, the dual clip limits the loss of tokens with a negative advantage (arXiv 1912.09729, eq. 5).
    """
    ratio_N, advantages_N = exp_ratio(logprobs_N - old_N), tokens.advantages_N
    low, high = 1 - config.clip_low, 1 + config.clip_high
    loss_N = torch.maximum(-ratio_N * advantages_N, -ratio_N.clamp(low, high) * advantages_N)
    detached_ratio_N, bad_N = ratio_N.detach(), advantages_N < 0
    dual_clipped_N = None
    if config.dual_clip is not None:
        dual_clipped_N = (detached_ratio_N > config.dual_clip) & bad_N
        loss_N = torch.where(dual_clipped_N, -config.dual_clip * advantages_N, loss_N)
    return LossOutputs(
        loss_N=loss_N,
        ratio_N=detached_ratio_N,
        clipped_low_N=(detached_ratio_N < low) & bad_N,
        clipped_high_N=(detached_ratio_N > high) & (advantages_N > 0),
        dual_clipped_N=dual_clipped_N,
    )


def gspo(logprobs_N: Tensor, old_N: Tensor, *, tokens: LossInputs, config: Gspo) -> LossOutputs:
    """Return a clipped loss for each token, with the probability ratio of the token's whole sequence (GSPO, arXiv
    2507.18071, eq. 13 and 14).

    The ratio has the value of the sequence's ratio, but only the token's own log-prob has a gradient. If all tokens of
    a sequence have the same advantage, the mean of their losses has the same value and gradient as the loss of the
    sequence (eq. 5).
    """
    sequence_N = sequence_ratio(logprobs_N.detach(), old_N, rows_N=tokens.rows_N, lengths_B=tokens.lengths_B)
    ratio_N = sequence_N * torch.exp(logprobs_N - logprobs_N.detach())
    low, high = 1 - config.clip_low, 1 + config.clip_high
    advantages_N = tokens.advantages_N
    return LossOutputs(
        loss_N=torch.maximum(-ratio_N * advantages_N, -ratio_N.clamp(low, high) * advantages_N),
        ratio_N=sequence_N,
        clipped_low_N=(sequence_N < low) & (advantages_N < 0),
        clipped_high_N=(sequence_N > high) & (advantages_N > 0),
    )


def sequence_ratio(logprobs_N: Tensor, old_N: Tensor, *, rows_N: Tensor, lengths_B: Tensor) -> Tensor:
    """Return for each token the ratio of its sequence, exp(mean log-ratio of the sequence's tokens) (N; eq. 7).

    `rows_N` is the sequence of each token, and `lengths_B` the number of tokens of each sequence. The sums are computed
    by segment reduction, which adds in a fixed order. `index_add` on an accelerator adds in a varying order, so results
    would not be reproducible.
    """
    sums_B = torch.segment_reduce(logprobs_N - old_N, "sum", lengths=lengths_B, unsafe=True)
    return exp_ratio(sums_B / lengths_B.clamp(min=1)).index_select(0, rows_N)


def cispo(logprobs_N: Tensor, old_N: Tensor, *, tokens: LossInputs, config: Cispo) -> LossOutputs:
    """Return minus log-prob times advantage, weighted by the clipped ratio (CISPO, arXiv 2506.13585, eq. 4 and 5).

    The weight has no gradient. Tokens whose ratio is outside the bounds are still trained on, with the bound as their
    weight.
    """
    ratio_N = exp_ratio(logprobs_N.detach() - old_N)
    low, high = 1 - config.clip_low, 1 + config.clip_high
    return LossOutputs(
        loss_N=-ratio_N.clamp(low, high) * tokens.advantages_N * logprobs_N,
        ratio_N=ratio_N,
        clipped_low_N=ratio_N < low,
        clipped_high_N=ratio_N > high,
    )


def policy_gradient(logprobs_N: Tensor, old_N: Tensor, *, tokens: LossInputs, config: PolicyGradient) -> LossOutputs:
    """Return minus log-prob times advantage for each token (REINFORCE, Williams, 1992). The probability ratio is
    computed only for metrics."""
    never_N = torch.zeros_like(tokens.advantages_N, dtype=torch.bool)
    return LossOutputs(
        loss_N=-tokens.advantages_N * logprobs_N,
        ratio_N=exp_ratio(logprobs_N.detach() - old_N),
        clipped_low_N=never_N,
        clipped_high_N=never_N,
    )


def sapo(logprobs_N: Tensor, old_N: Tensor, *, tokens: LossInputs, config: Sapo) -> LossOutputs:
    """Return minus advantage times the soft gate (4 / τ) · σ(τ · (ratio − 1)) of each token (SAPO, arXiv 2511.20347).
    The temperature τ depends on the sign of the advantage.

    At ratio 1 the gradient equals that of minus ratio times advantage. It fades smoothly on both sides of 1, so no
    token counts as clipped.
    """
    ratio_N, advantages_N = exp_ratio(logprobs_N - old_N), tokens.advantages_N
    temperature_N = torch.where(advantages_N > 0, config.positive_temperature, config.negative_temperature)
    gate_N = torch.sigmoid(temperature_N * (ratio_N - 1)) * 4 / temperature_N
    never_N = torch.zeros_like(advantages_N, dtype=torch.bool)
    return LossOutputs(
        loss_N=-gate_N * advantages_N, ratio_N=ratio_N.detach(), clipped_low_N=never_N, clipped_high_N=never_N
    )


def gmpo(logprobs_N: Tensor, old_N: Tensor, *, tokens: LossInputs, config: Gmpo) -> LossOutputs:
    """Return minus advantage times the geometric mean of the clipped ratios of the token's sequence (GMPO, arXiv
    2507.20673).

    Log-ratios are clipped only in the direction in which the advantage pushes them. As in `gspo`, each token's loss has
    the value of the sequence's loss, but only the token's own log-prob has a gradient. If all tokens of a sequence have
    the same advantage, the mean of their losses has the same value and gradient as the loss of the sequence.
    """
    log_ratio_N, good_N = logprobs_N - old_N, tokens.advantages_N > 0
    clipped_N = torch.where(good_N, log_ratio_N.clamp(max=config.clip_high), log_ratio_N.clamp(min=-config.clip_low))
    detached_N, sequences = log_ratio_N.detach(), {"rows_N": tokens.rows_N, "lengths_B": tokens.lengths_B}
    mean_N = sequence_ratio(clipped_N.detach(), torch.zeros_like(old_N), **sequences)
    return LossOutputs(
        loss_N=-tokens.advantages_N * mean_N * torch.exp(clipped_N - clipped_N.detach()),
        ratio_N=sequence_ratio(logprobs_N.detach(), old_N, **sequences),
        clipped_low_N=(detached_N < -config.clip_low) & (tokens.advantages_N < 0),
        clipped_high_N=(detached_N > config.clip_high) & good_N,
    )


def vespo(logprobs_N: Tensor, old_N: Tensor, *, tokens: LossInputs, config: Vespo) -> LossOutputs:
    """Return minus log-prob times advantage, weighted by φ(W) = W^k · exp(λ · (1 − W)), the kernel of VESPO (arXiv
    2602.10693). W is the ratio of the token's whole sequence, the product of the ratios of its tokens.

    Power k and decay λ depend on the sign of the advantage. The weight has no gradient and is largest at W = k / λ.
    log W is clamped to ±20. At the upper bound the weight is practically 0, and at the lower bound it is exp(λ − 20·k).
    """
    differences_N = (logprobs_N.detach() - old_N).double()
    sums_B = torch.segment_reduce(differences_N, "sum", lengths=tokens.lengths_B, unsafe=True).to(logprobs_N.dtype)
    log_ratio_N = sums_B.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).index_select(0, tokens.rows_N)
    ratio_N, good_N = log_ratio_N.exp(), tokens.advantages_N >= 0
    power_N = torch.where(good_N, config.positive_power, config.negative_power)
    decay_N = torch.where(good_N, config.positive_decay, config.negative_decay)
    never_N = torch.zeros_like(good_N)
    return LossOutputs(
        loss_N=-torch.exp(power_N * log_ratio_N + decay_N * (1 - ratio_N)) * tokens.advantages_N * logprobs_N,
        ratio_N=ratio_N,
        clipped_low_N=never_N,
        clipped_high_N=never_N,
    )


def clip_cov(logprobs_N: Tensor, old_N: Tensor, *, tokens: LossInputs, config: ClipCov) -> LossOutputs:
    """Return the loss of `ppo_clip`, but 0 for the selected tokens (Clip-Cov, arXiv 2505.22617)."""
    assert tokens.selected_N is not None, "clip_cov needs the selection of tokens"
    clip = PpoClip(clip_low=config.clip_low, clip_high=config.clip_high)
    terms = ppo_clip(logprobs_N, old_N, tokens=tokens, config=clip)
    return terms._replace(loss_N=terms.loss_N.masked_fill(tokens.selected_N, 0.0))


def kl_cov(logprobs_N: Tensor, old_N: Tensor, *, tokens: LossInputs, config: KlCov) -> LossOutputs:
    """Return minus ratio times advantage for each token, plus the coefficient times |log-ratio| for the selected tokens
    (KL-Cov, arXiv 2505.22617). The absolute log-ratio is the estimate of the KL divergence in the authors' code."""
    assert tokens.selected_N is not None, "kl_cov needs the selection of tokens"
    log_ratio_N = logprobs_N - old_N
    ratio_N, never_N = exp_ratio(log_ratio_N), torch.zeros_like(tokens.selected_N)
    penalty_N = torch.where(tokens.selected_N, config.coefficient * log_ratio_N.abs(), 0.0)
    return LossOutputs(
        loss_N=-ratio_N * tokens.advantages_N + penalty_N,
        ratio_N=ratio_N.detach(),
        clipped_low_N=never_N,
        clipped_high_N=never_N,
    )


def dppo(logprobs_N: Tensor, old_N: Tensor, *, tokens: LossInputs, config: Dppo) -> LossOutputs:
    """Return minus ratio times advantage for each token, and 0 if the advantage moves the token's probability further
    away from the behavior probability and their divergence is above the threshold (DPPO, arXiv 2602.04879).

    The divergence is always measured from the behavior log-probs, as in the paper, even if the ratio is not.
    """
    ratio_N, advantages_N = exp_ratio(logprobs_N - old_N), tokens.advantages_N
    current_N, behavior_N = logprobs_N.detach(), tokens.behavior_N
    distance_N = total_variation if config.divergence == "tv" else binary_kl
    is_far_N = distance_N(behavior_N, current_N) > config.max_divergence
    low_N = is_far_N & (current_N < behavior_N) & (advantages_N < 0)
    high_N = is_far_N & (current_N > behavior_N) & (advantages_N > 0)
    return LossOutputs(
        loss_N=-(ratio_N * advantages_N).masked_fill(low_N | high_N, 0.0),
        ratio_N=ratio_N.detach(),
        clipped_low_N=low_N,
        clipped_high_N=high_N,
    )


def total_variation(first_N: Tensor, second_N: Tensor) -> Tensor:
    """Return the total variation of two policies with these log-probs, for the outcomes "this token" and "another
    token" (N)."""
    return (first_N.exp() - second_N.exp()).abs()


def binary_kl(first_N: Tensor, second_N: Tensor) -> Tensor:
    """Return KL(first ‖ second) in nats of two policies with these log-probs, for the outcomes "this token" and
    "another token" (N). Probabilities of other tokens below 1e-8 count as 1e-8."""
    first_others_N, second_others_N = (-torch.expm1(each_N).clamp(max=-1e-8) for each_N in (first_N, second_N))
    return first_N.exp() * (first_N - second_N) + first_others_N * (first_others_N / second_others_N).log()


def policy_loss(logprobs_N: Tensor, old_N: Tensor, *, tokens: LossInputs, config: PolicyLoss) -> LossOutputs:
    """Return the loss of each token, computed by the configured kind of policy loss. `old_N` are the log-probs in the
    denominator of the ratio."""
    loss = cast(LossFunction, implementation_of(config))
    return loss(logprobs_N, old_N, tokens=tokens, config=config)
