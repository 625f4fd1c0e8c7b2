"""Statistics of groups: of the rewards of their completions, or of the values of all their tokens.

Shapes: N values, G groups. A missing value is NaN; it counts in no mean.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Mask = NDArray[np.bool_]

MIN_STD = 1e-6
"""Spread below which values are equal."""


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """Count, mean and population standard deviation of the values that each group has."""

    count_G: Integers
    mean_G: Floats
    std_G: Floats

    @property
    def differ(self) -> Mask:
        """Whether a group tells better from worse: at least two values, not all equal."""
        differ_G: Mask = (self.count_G >= 2) & (self.std_G >= MIN_STD)
        return differ_G


def group_statistics(values_N: Floats, group_N: Integers, num_groups: int) -> GroupStatistics:
    """Gather values by the index of their group; groups may interleave. One without values has 0 everywhere."""
    found_N = np.isfinite(values_N)
    if not found_N.all():
        group_N, values_N = group_N[found_N], values_N[found_N]
    count_G = np.bincount(group_N, minlength=num_groups)
    divisor_G = np.maximum(count_G, 1)
    mean_G = np.bincount(group_N, weights=values_N, minlength=num_groups) / divisor_G
    squares_N = (values_N - mean_G[group_N]) ** 2
    std_G = np.sqrt(np.bincount(group_N, weights=squares_N, minlength=num_groups) / divisor_G)
    return GroupStatistics(count_G=count_G, mean_G=mean_G, std_G=std_G)
