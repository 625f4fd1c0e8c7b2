"""What a front of policies, one for each preference, is worth; rewards are to be large. Shapes: P points, N rewards."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from infra.config import Settings
from models.records.columns import Floats, Mask

INSIDE: Final = 0.2
"""The least share of every reward for a preference to count as inside."""


class FrontMetrics(Settings):
    """Numbers of a front, of standardised rewards."""

    hypervolume: float
    """Volume between the points and the reference point, in units of the rewards' product."""
    mean: float
    """Mean of Σ μ_i R_i over all preferences."""
    inside: float | None
    """The same over those that give every reward a fair share; none where the grid has no such."""
    corners: tuple[float, ...]
    """R_i of the policy for reward i alone, by reward."""
    kendall_tau: float | None
    """Mean over rewards of τ_b between μ_i and R_i, 1 where more always gives more; none where all R_i are equal."""
    non_dominated: int
    """Points that no other beats in one reward without losing in another."""
    sparsity: float
    """Mean squared gap between neighbours among them (Xu et al. 2020, PGMORL)."""
    spacing: float
    """Standard deviation of their distances to the nearest one (Schott 1995)."""


def measure_front(
    preferences: Sequence[Sequence[float]], rewards: Sequence[Sequence[float]], reference: Sequence[float]
) -> FrontMetrics:
    """Measure policies by preference; the grid has its corners."""
    preferences_PN, rewards_PN = np.array(preferences, float), np.array(rewards, float)
    weighted_P = (preferences_PN * rewards_PN).sum(axis=1)
    inside_P = preferences_PN.min(axis=1) >= INSIDE - 1e-9
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
    """Volume of all that some point beats and that beats the reference; exact, slice by slice of the last reward."""
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
    """The points, each once, than which no other is as large in every reward."""
    points_PN = np.unique(rewards_PN, axis=0)
    beaten_P: Mask = np.array([bool(_beats(points_PN, point_N).any()) for point_N in points_PN], np.bool_)
    return points_PN[~beaten_P]


def sparsity(points_PN: Floats) -> float:
    """Mean over neighbours in each reward's order of the squared gap, summed over rewards; 0 of a single point."""
    if len(points_PN) < 2:
        return 0.0
    gaps = np.diff(np.sort(points_PN, axis=0), axis=0)
    return float((gaps**2).sum() / (len(points_PN) - 1))


def spacing(points_PN: Floats) -> float:
    """Standard deviation of the city-block distances to the nearest other point; 0 of fewer than three."""
    if len(points_PN) < 3:
        return 0.0
    distances_PP = np.abs(points_PN[:, None] - points_PN[None]).sum(axis=2) + np.diag(np.full(len(points_PN), np.inf))
    return float(distances_PP.min(axis=1).std(ddof=1))


def _beats(points_PN: Floats, point_N: Floats) -> Mask:
    return np.logical_and((points_PN >= point_N).all(axis=1), (points_PN > point_N).any(axis=1))


def _corner(preferences_PN: Floats, reward: int) -> int:
    return int(np.argmax(preferences_PN[:, reward]))


def _kendall_tau(preferences_PN: Floats, rewards_PN: Floats) -> float | None:
    from scipy.stats import kendalltau  # a second to import

    columns = zip(preferences_PN.T, rewards_PN.T, strict=True)
    taus = [float(kendalltau(shares_P, rewards_P).statistic) for shares_P, rewards_P in columns]
    return None if any(np.isnan(taus)) else float(np.mean(taus))
