"""Clipped policy losses per token. Shapes: N completion tokens, of any number of sequences."""

from typing import NamedTuple

import torch
from torch import Tensor

from models.objectives.config import PpoClip


class PolicyTerms(NamedTuple):
    """What one loss says of each token."""

    loss_N: Tensor
    ratio_N: Tensor
    clipped_low_N: Tensor
    """True where the lower bound cut the gradient off."""
    clipped_high_N: Tensor
    """True where the upper bound cut the gradient off."""


def ppo_clip(logprobs_N: Tensor, old_logprobs_N: Tensor, *, advantages_N: Tensor, config: PpoClip) -> PolicyTerms:
    """Take the pessimistic of the plain and the clipped surrogate (PPO, arXiv 1707.06347, eq. 7; DAPO's bounds)."""
    ratio_N = torch.exp(logprobs_N - old_logprobs_N)
    low, high = 1 - config.clip_low, 1 + config.clip_high
    loss_N = torch.maximum(-ratio_N * advantages_N, -ratio_N.clamp(low, high) * advantages_N)
    seen_N = ratio_N.detach()
    return PolicyTerms(
        loss_N=loss_N,
        ratio_N=seen_N,
        clipped_low_N=(seen_N < low) & (advantages_N < 0),
        clipped_high_N=(seen_N > high) & (advantages_N > 0),
    )
