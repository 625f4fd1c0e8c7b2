"""The controller of a KL coefficient: a pure function of what the iteration before measured. Torch-free."""

import math

from models.config.objectives import AdaptiveKl

MAX_ERROR = 0.2
"""A relative error counts at most so much (arXiv 1909.08593, section 2.2)."""


def next_coefficient(coefficient: float, *, kl: float, completions: int, adaptive: AdaptiveKl) -> float:
    """Coefficient of the next iteration, after one of so many completions whose mean divergence was `kl` per token.

    The proportional controller in log space of arXiv 1909.08593, section 2.2. There the factor is 1 + error / horizon
    for each completion; theirs compounded is the exponential, which stays positive for batches beyond the horizon.
    """
    error = min(max(kl / adaptive.target - 1, -MAX_ERROR), MAX_ERROR)
    return coefficient * math.exp(error * completions / adaptive.horizon)
