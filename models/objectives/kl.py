"""Estimators of KL(policy ‖ reference) from samples of the policy (Schulman, "Approximating KL divergence").

Shapes: N completion tokens.
"""

from typing import Literal

import torch
from torch import Tensor


def kl_estimate(logprobs_N: Tensor, reference_N: Tensor, *, kind: Literal["k1", "k2", "k3"]) -> Tensor:
    """Estimate the divergence at each token.

    k1 is unbiased and may be negative, k2 is biased and has a low variance, k3 is unbiased and never negative. As a
    term of the loss k2 has, on samples of the policy itself, the gradient of the true divergence; that of k1 is zero
    on average.
    """
    log_ratio_N = logprobs_N - reference_N
    match kind:
        case "k1":
            return log_ratio_N
        case "k2":
            return log_ratio_N.square() / 2
        case "k3":
            return torch.expm1(-log_ratio_N) + log_ratio_N
