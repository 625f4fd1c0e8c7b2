"""Group-relative advantages: GRPO (arXiv 2402.03300, section 4.1.2) and Dr. GRPO (arXiv 2503.20783, section 3.2).

Shapes: N completions, G groups. A missing reward is NaN; it counts in no mean and its advantage is NaN.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

MIN_STD = 1e-6
"""Spread below which a group's rewards are equal."""
EPSILON = 1e-6
"""Added to the standard deviation in the denominator."""


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """Count, mean and population standard deviation of the rewards that each group has."""

    group_N: Integers
    """Index of each completion's group."""
    count_G: Integers
    mean_G: Floats
    std_G: Floats
    informative_G: NDArray[np.bool_]
    """Whether a group tells better from worse: at least two rewards, not all equal."""


def group_statistics(rewards_N: Floats, group_ids_N: Integers) -> GroupStatistics:
    """Gather rewards by group; groups may interleave. A group without rewards has count, mean and deviation 0."""
    ids_G, group_N = np.unique(group_ids_N, return_inverse=True)
    scored_N = np.isfinite(rewards_N)
    group_M, rewards_M = group_N[scored_N], rewards_N[scored_N]  # M: the completions that have a reward
    count_G = np.bincount(group_M, minlength=len(ids_G))
    divisor_G = np.maximum(count_G, 1)
    mean_G = np.bincount(group_M, weights=rewards_M, minlength=len(ids_G)) / divisor_G
    squares_M = (rewards_M - mean_G[group_M]) ** 2
    std_G = np.sqrt(np.bincount(group_M, weights=squares_M, minlength=len(ids_G)) / divisor_G)
    informative_G = (count_G >= 2) & (std_G >= MIN_STD)
    return GroupStatistics(group_N=group_N, count_G=count_G, mean_G=mean_G, std_G=std_G, informative_G=informative_G)


def group_relative(rewards_N: Floats, group_ids_N: Integers, normalise_std: bool) -> Floats:
    """Centre rewards on their group's mean, over its deviation if `normalise_std`; equal rewards teach nothing: 0.

    >>> group_relative(np.array([1.0, 0.0, 5.0]), np.array([7, 7, 8]), normalise_std=False)
    array([ 0.5, -0.5,  0. ])
    """
    return advantages(rewards_N, group_statistics(rewards_N, group_ids_N), normalise_std)


def advantages(rewards_N: Floats, groups: GroupStatistics, normalise_std: bool) -> Floats:
    """Do what `group_relative` does, with statistics at hand."""
    scale_G = groups.std_G + EPSILON if normalise_std else np.ones_like(groups.std_G)
    centred_N = rewards_N - groups.mean_G[groups.group_N]
    relative_N: Floats = centred_N / scale_G[groups.group_N]
    relative_N[np.isfinite(rewards_N) & ~groups.informative_G[groups.group_N]] = 0.0
    return relative_N
