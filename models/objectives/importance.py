"""The mismatch between the policy that generated and the one that learns, and its correction by importance sampling.

Shapes: N completion tokens.
"""

from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from infra.variants import implementation_of
from models.config.objectives import (
    MAX_LOG_RATIO,
    Correction,
    MaskedImportance,
    NoCorrection,
    TruncatedImportance,
    UpdateConfig,
)


def exp_ratio(log_ratio: Tensor) -> Tensor:
    """Exponentiate log-ratios, clamped at ±20: a ratio is finite, and beyond the clamp it has no gradient of its own.

    Of an infinite ratio a token without advantage or weight would make 0 · inf, and the whole update would be lost.
    """
    return torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def k3(log_ratio: Tensor) -> Tensor:
    """Return ratio − 1 − log-ratio (Schulman, "Approximating KL divergence"), of log-ratios clamped at ±20."""
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(bounded) - bounded


class Mismatch(NamedTuple):
    """How far the trainer's log-probs are from the engine's, per token."""

    difference_N: Tensor
    """|log π_train − log π_behaviour|."""
    weight_N: Tensor
    """π_train / π_behaviour, before any cap but that of log-ratios."""
    kl_N: Tensor
    """k3 estimate of KL(behaviour ‖ train)."""


def mismatch(train_N: Tensor, behaviour_N: Tensor) -> Mismatch:
    """Compare the log-probs of the same tokens under the same weights: what differs is arithmetic alone."""
    log_ratio_N = train_N - behaviour_N
    return Mismatch(
        difference_N=log_ratio_N.abs(),
        weight_N=exp_ratio(log_ratio_N),
        kl_N=k3(log_ratio_N),
    )


class Corrected(NamedTuple):
    """What a correction makes of each token."""

    old_N: Tensor
    """Log-probs that the loss compares the policy with: those before the update where the token is corrected, else the
    behaviour's."""
    weight_N: Tensor
    """Factor of the policy loss, a constant to the gradient."""
    truncated_N: Tensor
    """True where a cap made the weight smaller."""
    masked_N: Tensor
    """True where a band made it zero."""


class CorrectionFunction(Protocol):
    """Corrects tokens, each by itself."""

    def __call__(self, old_N: Tensor, behaviour_N: Tensor, correction: Any, /) -> Corrected:  # noqa: ANN401 -- its own
        """Compare the trainer's log-probs before the update with those of the engine."""
        ...


def needs_old(config: UpdateConfig) -> bool:
    """Whether a correction in use compares with the trainer's log-probs before the update."""
    stale = config.stale_correction
    return config.correction.compares_with_trainer or (stale is not None and stale.compares_with_trainer)


def correct(old_N: Tensor, behaviour_N: Tensor, *, staleness_N: Tensor, config: UpdateConfig) -> Corrected:
    """Correct fresh tokens by one rule, and by another, if there is one, those that an earlier policy version wrote.

    Each token is weighed against the log-prob of whichever version wrote it.
    """
    fresh = _correct(old_N, behaviour_N, correction=config.correction)
    if config.stale_correction is None:
        return fresh
    stale = _correct(old_N, behaviour_N, correction=config.stale_correction)
    stale_N = staleness_N > 0
    return Corrected(*(torch.where(stale_N, one, other) for one, other in zip(stale, fresh, strict=True)))


def _correct(old_N: Tensor, behaviour_N: Tensor, *, correction: Correction) -> Corrected:
    return cast(CorrectionFunction, implementation_of(correction))(old_N, behaviour_N, correction)


def uncorrected(old_N: Tensor, behaviour_N: Tensor, correction: NoCorrection) -> Corrected:
    """Take the behaviour's log-probs as they are."""
    never_N = torch.zeros_like(behaviour_N, dtype=torch.bool)
    return Corrected(behaviour_N, torch.ones_like(behaviour_N), never_N, never_N)


def truncated(old_N: Tensor, behaviour_N: Tensor, correction: TruncatedImportance) -> Corrected:
    """Weigh by the ratio, up to a cap."""
    ratio_N = exp_ratio(old_N - behaviour_N).detach()
    never_N = torch.zeros_like(ratio_N, dtype=torch.bool)
    return Corrected(old_N, ratio_N.clamp(max=correction.cap), ratio_N > correction.cap, never_N)


def masked(old_N: Tensor, behaviour_N: Tensor, correction: MaskedImportance) -> Corrected:
    """Weigh by the ratio, and by 0 where it is outside the band."""
    ratio_N = exp_ratio(old_N - behaviour_N).detach()
    masked_N = (ratio_N < correction.low) | (ratio_N > correction.high)
    return Corrected(old_N, ratio_N.masked_fill(masked_N, 0.0), torch.zeros_like(masked_N), masked_N)
