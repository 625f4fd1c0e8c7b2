"""Bone Soup (arXiv 2502.10762): the mixes of rewards on which backbones (policies to merge) are trained, and the
weights of the merge for a preference.

Backbone j is trained on h_j = Σ_i B_ji r_i over standardized rewards r, where B has β on its diagonal and γ elsewhere.
To first order, training on Σ_i c_i r_i moves a policy by Σ_i c_i d_i. Therefore a merge with weights λ moves like
training for the preference B λ, and λ solves B λ = μ for the preference μ. With β = 1 this is λ = μ, Rewarded Soup
(arXiv 2306.04488). Shapes: N rewards.
"""

from collections.abc import Sequence
from itertools import product

import numpy as np

from rheostat.infra.errors import BadInput
from rheostat.models.config.soup import SoupMethod, find_beta_conflict
from rheostat.models.records.columns import Floats

SUM_ERROR = 1e-6
"""Maximum deviation from 1 of the sum of the shares in a preference, to allow for rounding."""


def mixing_matrix(num_rewards: int, beta: float) -> Floats:
    """Return the matrix B whose row j contains the weights of all rewards in the training of backbone j (a policy that
    is merged later): β on the diagonal, γ = (1 − β) / (N − 1) elsewhere, for N rewards. Raises BadInput unless 1/N < β
    <= 1."""
    if (reason := find_beta_conflict(beta, num_rewards)) is not None:
        raise BadInput(reason)
    gamma = (1 - beta) / (num_rewards - 1)
    return np.full((num_rewards, num_rewards), gamma) + np.eye(num_rewards) * (beta - gamma)


def merge_weights(preference: Sequence[float], beta: float) -> tuple[float, ...]:
    """Return the weights λ of the backbones for a preference μ: λ_i = (μ_i − γ) / (β − γ). Weights may be negative.

    Raises BadInput if μ is not a preference or β is out of range.

    >>> [round(weight, 6) for weight in merge_weights((1.0, 0.0), 0.7)]
    [1.75, -0.75]
    """
    check_preference(preference, len(preference))
    solved = np.linalg.solve(mixing_matrix(len(preference), beta), np.array(preference, float))
    return tuple(round(float(weight), 12) + 0.0 for weight in solved)  # removes rounding errors and -0.0


def compute_backbone_weights(method: SoupMethod, preference: Sequence[float], beta: float) -> tuple[float, ...]:
    """Return the weights with which the backbones (policies trained on different mixes of rewards) are merged for a
    preference, which is a share for each reward. Method `direct` uses the preference itself as weights."""
    solved = merge_weights(preference, beta)
    return tuple(map(float, preference)) if method == "direct" else solved


def check_preference(preference: Sequence[float], num_rewards: int) -> None:
    """Raise BadInput unless a preference (a share for each reward) has `num_rewards` shares that are at least 0 and sum
    to 1."""
    text = ",".join(f"{share:g}" for share in preference)
    if len(preference) != num_rewards:
        raise BadInput(
            f"preference {text}: a preference needs one number for each of the {num_rewards} reward terms, but it has "
            f"{len(preference)}"
        )
    if min(preference) < 0 or not abs(sum(preference) - 1) <= SUM_ERROR:
        raise BadInput(
            f"preference {text}: the shares of a preference must be at least 0 and sum to 1, but their sum is "
            f"{sum(preference):g}"
        )


def preference_grid(num_rewards: int, per_axis: int) -> list[tuple[float, ...]]:
    """Return all preferences (shares of `num_rewards` rewards that sum to 1) whose shares are multiples of 1 /
    (per_axis − 1), in ascending order."""
    steps = per_axis - 1
    counts = (each for each in product(range(steps + 1), repeat=num_rewards) if sum(each) == steps)
    return [tuple(count / steps for count in each) for each in counts]


def extrapolate_weights(weights: Sequence[float], alpha: float) -> tuple[tuple[float, ...], float]:
    """Return the weights of the backbones (the merged policies) and of the initial policy θ_start with which a merge θ
    is extrapolated to (1 + α) θ − α θ_start."""
    return tuple((1 + alpha) * weight for weight in weights), -alpha
