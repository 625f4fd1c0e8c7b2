"""Completion tokens for tests of losses: a few sequences with chosen or random log-probs."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.policy_losses import (
    Cispo,
    Dppo,
    Gmpo,
    Gspo,
    LossConfig,
    PolicyGradient,
    PpoClip,
    Sapo,
    Vespo,
)
from rheostat.models.objectives.loss_inputs import LossInputs, MetricSums
from rheostat.models.objectives.losses import tally_mismatch, update_loss

LOSSES: tuple[LossConfig, ...] = (
    PpoClip(),
    PpoClip(dual_clip=3.0),
    Gspo(clip_low=0.1, clip_high=0.15),
    Cispo(clip_low=0.3),
    PolicyGradient(),
    Sapo(),
    Gmpo(),
    Dppo(),
    Vespo(),
)
"""One loss of each kind, and with each option."""
NAMES = [f"{loss.kind}{'_dual' if getattr(loss, 'dual_clip', None) else ''}" for loss in LOSSES]


def doubles(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def pass_tokens(
    lengths: Sequence[int],
    *,
    behaviour: Sequence[float],
    advantages: Sequence[float],
    old: Sequence[float] | None = None,
    reference: Sequence[float] | None = None,
    staleness: Sequence[int] | None = None,
    weights: Sequence[float] | None = None,
) -> LossInputs:
    """Build tokens of sequences of these completion lengths, in float64. Each has weight 1 by default."""
    total = sum(lengths)
    return LossInputs(
        behavior_N=doubles(behaviour),
        advantages_N=doubles(advantages),
        staleness_N=torch.tensor(staleness or [0] * total, dtype=torch.int16),
        weights_N=doubles(weights or [1.0] * total),
        rows_N=torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
        lengths_B=torch.tensor(lengths),
        old_N=None if old is None else doubles(old),
        reference_N=None if reference is None else doubles(reference),
    )


def random_tokens(lengths: Sequence[int], *, seed: int, mismatch: float = 0.3, move: float = 0.3) -> LossInputs:
    """Build random tokens of random staleness.

    The old policy differs from the generating policy and from the reference.
    """
    rng, total = np.random.default_rng(seed), sum(lengths)
    old = -rng.exponential(1.5, total) - 0.01
    return pass_tokens(
        lengths,
        behaviour=(old - mismatch * rng.normal(size=total)).tolist(),
        advantages=rng.normal(size=total).tolist(),
        old=old.tolist(),
        reference=(old + move * rng.normal(size=total)).tolist(),
        staleness=rng.integers(0, 4, total).tolist(),
        weights=rng.uniform(0.1, 1, total).tolist(),
    )


def move_policy(tokens: LossInputs, *, seed: int, move: float = 0.3) -> Tensor:
    """Return log-probs of a policy after some training since the old policy, as a leaf that needs gradients."""
    assert tokens.old_N is not None, "nothing to move from"
    step_N = doubles(np.random.default_rng(seed + 1).normal(size=len(tokens.old_N)).tolist())
    return (tokens.old_N + move * step_N).detach().requires_grad_()


def evaluate_loss(
    logprobs_N: Tensor, tokens: LossInputs, config: UpdateConfig, *, kl: float = 0.0
) -> tuple[float, Tensor, dict[str, float]]:
    """Return the loss of a micro-batch, the gradient of its log-probs, and the sums and maxima that it reports."""
    leaf_N, tally = logprobs_N.detach().clone().requires_grad_(), MetricSums()
    if tokens.old_N is not None:
        tally_mismatch(tokens.old_N, tokens, tally=tally)
    loss = update_loss(leaf_N, tokens, config=config, kl_coefficient=kl, tally=tally)
    loss.backward()
    sums, maxima = tally.unpacked(*tally.packed())
    return loss.item(), leaf_N.grad, sums | maxima
