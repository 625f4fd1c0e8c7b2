"""CISPO's loss per token. Shapes: N completion tokens, of any number of sequences."""

import torch
from torch import Tensor

from models.objectives.config import Cispo
from models.objectives.pass_tokens import PolicyTerms


def cispo(logprobs_N: Tensor, old_N: Tensor, *, advantages_N: Tensor, config: Cispo) -> PolicyTerms:
    """Weigh log-probs by the clipped ratio, a constant to the gradient (CISPO, arXiv 2506.13585, eq. 4 and 5).

    No token is dropped: where the ratio is out of bounds, its weight stops growing or falling.
    """
    ratio_N = torch.exp(logprobs_N.detach() - old_N)
    low, high = 1 - config.clip_low, 1 + config.clip_high
    return PolicyTerms(
        loss_N=-ratio_N.clamp(low, high) * advantages_N * logprobs_N,
        ratio_N=ratio_N,
        clipped_low_N=ratio_N < low,
        clipped_high_N=ratio_N > high,
    )
