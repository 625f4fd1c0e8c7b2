"""The critic's loss per token, and how much of the returns it explains. Shapes: N completion tokens."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

ROUNDING = 1e-12
"""Share of a mean square that float64 sums of a few million numbers may get wrong."""


class ValueTerms(NamedTuple):
    """What the loss says of each token."""

    loss_N: Tensor
    clipped_N: Tensor
    """True where the value has moved so far that its gradient is cut off."""


def value_loss(values_N: Tensor, *, old_N: Tensor, returns_N: Tensor, clip: float) -> ValueTerms:
    """Take the worse of the plain squared error and that of values kept within `clip` of the old ones, halved.

    As the PPO of OpenAI's baselines (ppo2) does it; in the paper (arXiv 1707.06347, eq. 9) values are not clipped.
    """
    kept_N = old_N + (values_N - old_N).clamp(-clip, clip)
    plain_N, clipped_N = (values_N - returns_N).square(), (kept_N - returns_N).square()
    return ValueTerms(loss_N=torch.maximum(plain_N, clipped_N) / 2, clipped_N=(clipped_N > plain_N).detach())


def fit_sums(values_N: Tensor, returns_N: Tensor) -> dict[str, Tensor]:
    """Numbers per token whose sums, over passes and ranks, `explained_variance` needs."""
    returns, errors = returns_N.detach().double(), (returns_N - values_N).detach().double()
    return {
        "fit_tokens": torch.ones_like(returns),
        "fit_returns": returns,
        "fit_returns_squared": returns.square(),
        "fit_errors": errors,
        "fit_errors_squared": errors.square(),
    }


def explained_variance(sums: Mapping[str, float]) -> float:
    """Return 1 − Var(return − value) / Var(return): 1 is perfect, 0 no better than a constant; 0 for equal returns."""
    count = sums["fit_tokens"]
    variance = _variance(count, sums["fit_returns"], sums["fit_returns_squared"])
    unexplained = _variance(count, sums["fit_errors"], sums["fit_errors_squared"])
    return 1 - unexplained / variance if variance else 0.0


def _variance(count: float, total: float, squares: float) -> float:
    """Variance from sums; 0 where it is but their rounding."""
    variance = squares / count - (total / count) ** 2 if count else 0.0
    return variance if count and variance > ROUNDING * squares / count else 0.0
