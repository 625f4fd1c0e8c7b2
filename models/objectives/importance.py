"""The mismatch between the engine that generated and the trainer, and its correction by importance sampling.

Shapes: N completion tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Mismatch(NamedTuple):
    """How far the trainer's log-probs are from the engine's, per token."""

    difference_N: Tensor
    """|log π_train − log π_behaviour|."""
    weight_N: Tensor
    """π_train / π_behaviour, before any cap."""
    kl_N: Tensor
    """k3 estimate of KL(behaviour ‖ train)."""


def mismatch(train_N: Tensor, behaviour_N: Tensor) -> Mismatch:
    """Compare the log-probs of the same tokens.

    Where an earlier policy wrote a token (partial rollout, groups kept for an iteration), the difference holds what was
    learnt since, beside the mismatch of engine and trainer.
    """
    log_ratio_N = train_N - behaviour_N
    return Mismatch(
        difference_N=log_ratio_N.abs(),
        weight_N=log_ratio_N.exp(),
        kl_N=torch.expm1(log_ratio_N) - log_ratio_N,
    )


def truncated_weight(old_N: Tensor, behaviour_N: Tensor, *, cap: float) -> Tensor:
    """min(π_old / π_behaviour, cap), a constant to the gradient (truncated importance sampling).

    Per token, with the behaviour log-prob of whichever policy version wrote it.
    """
    return torch.exp(old_N - behaviour_N).clamp(max=cap).detach()
