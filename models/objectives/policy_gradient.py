"""The plain policy gradient per token. Shapes: N completion tokens, of any number of sequences."""

import torch
from torch import Tensor

from models.objectives.pass_tokens import PolicyTerms


def policy_gradient(logprobs_N: Tensor, old_N: Tensor, *, advantages_N: Tensor) -> PolicyTerms:
    """Log-prob times advantage (REINFORCE, Williams, 1992); the ratio is measured and changes nothing."""
    never_N = torch.zeros_like(advantages_N, dtype=torch.bool)
    return PolicyTerms(
        loss_N=-advantages_N * logprobs_N,
        ratio_N=torch.exp(logprobs_N.detach() - old_N),
        clipped_low_N=never_N,
        clipped_high_N=never_N,
    )
