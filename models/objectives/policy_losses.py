"""Policy losses per token. Shapes: N completion tokens of one pass, of any number of sequences; B sequences."""

from typing import cast

import torch
from torch import Tensor

from infra.variants import implementation_of
from models.config.objectives import Cispo, Gspo, PolicyGradient, PolicyLoss, PpoClip
from models.objectives.loss_inputs import LossFunction, LossInputs, LossOutputs


def ppo_clip(logprobs_N: Tensor, old_N: Tensor, *, tokens: LossInputs, config: PpoClip) -> LossOutputs:
    """Take the pessimistic of the plain and the clipped surrogate (PPO, arXiv 1707.06347, eq. 7; DAPO's bounds).

    The dual clip bounds that pessimism where the advantage is negative (arXiv 1912.09729, eq. 5).
    """
    ratio_N, advantages_N = torch.exp(logprobs_N - old_N), tokens.advantages_N
    low, high = 1 - config.clip_low, 1 + config.clip_high
    loss_N = torch.maximum(-ratio_N * advantages_N, -ratio_N.clamp(low, high) * advantages_N)
    seen_N, bad_N = ratio_N.detach(), advantages_N < 0
    dual_clipped_N = None
    if config.dual_clip is not None:
        dual_clipped_N = (seen_N > config.dual_clip) & bad_N
        loss_N = torch.where(dual_clipped_N, -config.dual_clip * advantages_N, loss_N)
    return LossOutputs(
        loss_N=loss_N,
        ratio_N=seen_N,
        clipped_low_N=(seen_N < low) & bad_N,
        clipped_high_N=(seen_N > high) & (advantages_N > 0),
        dual_clipped_N=dual_clipped_N,
    )


def gspo(logprobs_N: Tensor, old_N: Tensor, *, tokens: LossInputs, config: Gspo) -> LossOutputs:
    """Clip the sequence's ratio, in its token form (GSPO, arXiv 2507.18071, eq. 13 and 14).

    Every token has its sequence's ratio as value and its own log-prob's gradient times that ratio. Where all tokens of
    a sequence have one advantage, their mean has the value and gradient of the form per sequence (eq. 5).
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
    """Return exp(mean log-ratio) of each token's sequence (eq. 7).

    By segments, whose sums have one order: `index_add` on an accelerator adds in another one every time.
    """
    sums_B = torch.segment_reduce(logprobs_N - old_N, "sum", lengths=lengths_B, unsafe=True)
    return torch.exp(sums_B / lengths_B.clamp(min=1)).index_select(0, rows_N)


def cispo(logprobs_N: Tensor, old_N: Tensor, *, tokens: LossInputs, config: Cispo) -> LossOutputs:
    """Weigh log-probs by the clipped ratio, a constant to the gradient (CISPO, arXiv 2506.13585, eq. 4 and 5).

    No token is dropped: where the ratio is out of bounds, its weight stops growing or falling.
    """
    ratio_N = torch.exp(logprobs_N.detach() - old_N)
    low, high = 1 - config.clip_low, 1 + config.clip_high
    return LossOutputs(
        loss_N=-ratio_N.clamp(low, high) * tokens.advantages_N * logprobs_N,
        ratio_N=ratio_N,
        clipped_low_N=ratio_N < low,
        clipped_high_N=ratio_N > high,
    )


def policy_gradient(logprobs_N: Tensor, old_N: Tensor, *, tokens: LossInputs, config: PolicyGradient) -> LossOutputs:
    """Log-prob times advantage (REINFORCE, Williams, 1992); the ratio is measured and changes nothing."""
    never_N = torch.zeros_like(tokens.advantages_N, dtype=torch.bool)
    return LossOutputs(
        loss_N=-tokens.advantages_N * logprobs_N,
        ratio_N=torch.exp(logprobs_N.detach() - old_N),
        clipped_low_N=never_N,
        clipped_high_N=never_N,
    )


def policy_loss(logprobs_N: Tensor, old_N: Tensor, *, tokens: LossInputs, config: PolicyLoss) -> LossOutputs:
    """The loss that is configured; `old_N` are the log-probs that the policy is compared with."""
    loss = cast(LossFunction, implementation_of(config))
    return loss(logprobs_N, old_N, tokens=tokens, config=config)
