"""Quality measures of a front of policies, one policy for each preference. Higher rewards are better.

Shapes: P points, N rewards.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from infra.config import Settings
from models.records.columns import Floats, Mask

MIN_INSIDE_SHARE: Final = 0.2
"""Minimum share of every reward in a preference that counts as inside the front instead of near its border."""


class FrontMetrics(Settings):
    """Quality measures of a front, from standardized rewards."""

    hypervolume: float
    """Volume between the points and the reference point, in units of the product of the rewards."""
    mean: float
    """Mean of Σ μ_i R_i over all preferences."""
    inside: float | None
    """Mean of Σ μ_i R_i over the preferences that give every reward a share of at least 0.2. None if the grid has no
    such preference."""
    corners: tuple[float, ...]
    """Reward R_i of the policy trained for reward i alone, for each reward."""
    kendall_tau: float | None
    """Mean over rewards of τ_b between μ_i and R_i. 1 if a larger share always leads to a larger reward. None if one
    reward is equal at all points."""
    non_dominated: int
    """Number of points that no other point beats in one reward without being worse in another."""
    sparsity: float
    """Mean squared gap between neighboring non-dominated points (Xu et al. 2020, PGMORL)."""
    spacing: float
    """Standard deviation of the distances of the non-dominated points to the nearest other one (Schott 1995)."""


def measure_front(
    preferences: Sequence[Sequence[float]], rewards: Sequence[Sequence[float]], reference: Sequence[float]
) -> FrontMetrics:
    """Compute the quality measures of policies by preference. The preferences must include the corners of the grid."""
    preferences_PN, rewards_PN = np.array(preferences, float), np.array(rewards, float)
    weighted_P = (preferences_PN * rewards_PN).sum(axis=1)
    inside_P = preferences_PN.min(axis=1) >= MIN_INSIDE_SHARE - 1e-9
    best_PN = non_dominated(rewards_PN)
    return FrontMetrics(
        hypervolume=hypervolume(rewards_PN, np.array(reference, float)),
        mean=float(weighted_P.mean()),
        inside=float(weighted_P[inside_P].mean()) if inside_P.any() else None,
        corners=tuple(float(rewards_PN[_corner(preferences_PN, i), i]) for i in range(preferences_PN.shape[1])),
        kendall_tau=_kendall_tau(preferences_PN, rewards_PN),
        non_dominated=len(best_PN),
        sparsity=sparsity(best_PN),
        spacing=spacing(best_PN),
    )


def hypervolume(rewards_PN: Floats, reference_N: Floats) -> float:
    """Return the volume of the points below some policy and above the reference, exactly.

    The volume is computed recursively, slice by slice along the last reward.
    """
    above_PN = rewards_PN[(rewards_PN > reference_N).all(axis=1)]
    if not len(above_PN):
        return 0.0
    if rewards_PN.shape[1] == 1:
        return float(above_PN.max() - reference_N[0])
    levels = np.unique(above_PN[:, -1])
    heights = np.diff(levels, prepend=reference_N[-1])
    return sum(
        float(height) * hypervolume(above_PN[above_PN[:, -1] >= level, :-1], reference_N[:-1])
        for level, height in zip(levels, heights, strict=True)
    )


def non_dominated(rewards_PN: Floats) -> Floats:
    """Return the distinct points that are not dominated: no other one is at least as high in every reward."""
    points_PN = np.unique(rewards_PN, axis=0)
    beaten_P: Mask = np.array([bool(_beats(points_PN, point_N).any()) for point_N in points_PN], np.bool_)
    return points_PN[~beaten_P]


def sparsity(points_PN: Floats) -> float:
    """Return the mean squared gap between neighbors, summed over rewards.

    Neighbors are adjacent in the order of one reward. Returns 0 for a single point.
    """
    if len(points_PN) < 2:
        return 0.0
    gaps = np.diff(np.sort(points_PN, axis=0), axis=0)
    return float((gaps**2).sum() / (len(points_PN) - 1))


def spacing(points_PN: Floats) -> float:
    """Return the standard deviation of the city-block distances to the nearest point, or 0 for fewer than three."""
    if len(points_PN) < 3:
        return 0.0
    distances_PP = np.abs(points_PN[:, None] - points_PN[None]).sum(axis=2) + np.diag(np.full(len(points_PN), np.inf))
    return float(distances_PP.min(axis=1).std(ddof=1))


def _beats(points_PN: Floats, point_N: Floats) -> Mask:
    return np.logical_and((points_PN >= point_N).all(axis=1), (points_PN > point_N).any(axis=1))


def _corner(preferences_PN: Floats, reward: int) -> int:
    return int(np.argmax(preferences_PN[:, reward]))


def _kendall_tau(preferences_PN: Floats, rewards_PN: Floats) -> float | None:
    from scipy.stats import kendalltau  # takes a second to import

    columns = zip(preferences_PN.T, rewards_PN.T, strict=True)
    taus = [float(kendalltau(shares_P, rewards_P).statistic) for shares_P, rewards_P in columns]
    return None if any(np.isnan(taus)) else float(np.mean(taus))
