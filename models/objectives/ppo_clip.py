"""PPO's clipped surrogate per token. Shapes: N completion tokens, of any number of sequences."""

import torch
from torch import Tensor

from models.objectives.config import PpoClip
from models.objectives.pass_tokens import PolicyTerms


def ppo_clip(logprobs_N: Tensor, old_N: Tensor, *, advantages_N: Tensor, config: PpoClip) -> PolicyTerms:
    """Take the pessimistic of the plain and the clipped surrogate (PPO, arXiv 1707.06347, eq. 7; DAPO's bounds).

    The dual clip bounds that pessimism where the advantage is negative (arXiv 1912.09729, eq. 5).
    """
    ratio_N = torch.exp(logprobs_N - old_N)
    low, high = 1 - config.clip_low, 1 + config.clip_high
    loss_N = torch.maximum(-ratio_N * advantages_N, -ratio_N.clamp(low, high) * advantages_N)
    seen_N, bad_N = ratio_N.detach(), advantages_N < 0
    dual_clipped_N = None
    if config.dual_clip is not None:
        dual_clipped_N = (seen_N > config.dual_clip) & bad_N
        loss_N = torch.where(dual_clipped_N, -config.dual_clip * advantages_N, loss_N)
    return PolicyTerms(
        loss_N=loss_N,
        ratio_N=seen_N,
        clipped_low_N=(seen_N < low) & bad_N,
        clipped_high_N=(seen_N > high) & (advantages_N > 0),
        dual_clipped_N=dual_clipped_N,
    )
