"""Quality measures of a front: a set of policies, one for each preference (weighting of rewards). Higher rewards are
better.

Shapes: P points (policies), N rewards. μ_i is the share of reward i in a policy's preference, R_i is the policy's mean
reward i.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from rheostat.infra.config import Settings
from rheostat.models.records.columns import Floats, Mask

MIN_INSIDE_SHARE: Final = 0.2
"""Minimum share of every reward in a preference (weighting of rewards) that counts as balanced instead of close to a
single reward."""


class FrontMetrics(Settings):
    """Quality measures of a set of policies, one for each preference (weighting of rewards), computed from standardized
    rewards."""

    hypervolume: float
    """Volume of all points in the space of rewards that some policy exceeds in every reward and that exceed the
    reference point."""
    mean: float
    """Mean over all preferences of Σ μ_i R_i, where μ_i is the share of reward i in a preference and R_i the mean
    reward i of its policy."""
    inside: float | None
    """Mean of Σ μ_i R_i (the policy's rewards weighted by its preference μ) over the preferences in which every share
    is at least 0.2. None if the grid has no such preference."""
    corners: tuple[float, ...]
    """Mean of each reward under the policy that was merged for a preference for this reward alone."""
    kendall_tau: float | None
    """Kendall's rank correlation τ_b between the share of a reward in the preference and the reward, averaged over
    rewards. It is 1 if a larger share always leads to a larger reward. None if one reward is equal for all policies."""
    non_dominated: int
    """Number of policies that are not dominated: no other policy is better in one reward and at least as good in all
    others."""
    sparsity: float
    """Mean squared gap in the space of rewards between neighboring policies, among those that are not dominated (Xu et
    al. 2020, PGMORL)."""
    spacing: float
    """Standard deviation of the distances in the space of rewards from each non-dominated policy to the nearest other
    one (Schott 1995)."""


def measure_front(
    preferences: Sequence[Sequence[float]], rewards: Sequence[Sequence[float]], reference: Sequence[float]
) -> FrontMetrics:
    """Return quality measures of a set of policies, given the preference (share of each reward) and the mean rewards of
    each policy, and the reference point of the hypervolume. The preferences must include the corners of the grid, which
    are preferences for one reward alone."""
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
    """Return the exact volume of the region that is below some policy in every reward and above the reference point.
    `rewards_PN` has one row per policy and one column per reward. The volume is computed recursively, slice by slice
    along the last reward."""
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
    """Return the distinct rows of `rewards_PN` (policies x rewards) that are not dominated, that is, no other row is at
    least as high in every reward."""
    points_PN = np.unique(rewards_PN, axis=0)
    beaten_P: Mask = np.array([bool(_beats(points_PN, point_N).any()) for point_N in points_PN], np.bool_)
    return points_PN[~beaten_P]


def sparsity(points_PN: Floats) -> float:
    """Return the mean squared gap between neighboring points, summed over rewards. Points are neighbors if they are
    adjacent in the order of one reward. Returns 0 for a single point."""
    if len(points_PN) < 2:
        return 0.0
    gaps = np.diff(np.sort(points_PN, axis=0), axis=0)
    return float((gaps**2).sum() / (len(points_PN) - 1))


def spacing(points_PN: Floats) -> float:
    """Return the standard deviation of the city-block distances from each point to the nearest other point. 0 for fewer
    than three points."""
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
