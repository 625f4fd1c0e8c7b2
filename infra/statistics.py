"""Interval estimates for counts, and what stands for a distribution."""

from collections.abc import Sequence
from math import isclose, sqrt

Z95 = 1.959963984540054  # 97.5% quantile of the standard normal


def mean_interval(total: float, squares: float, count: int) -> tuple[float, float]:
    """95% interval of a mean from sum and sum of squares: Wilson's where every value is 0 or 1, else the normal one.

    >>> mean_interval(8, 8, 10) == wilson_interval(8, 10)
    True
    >>> [round(bound, 3) for bound in mean_interval(30, 350, 3)]  # 5, 10 and 15
    [4.342, 15.658]
    """
    if isclose(total, squares, abs_tol=1e-9) or count < 2:
        return wilson_interval(min(max(total, 0.0), count), count)
    mean = total / count
    deviation = sqrt(max(0.0, squares - count * mean**2) / (count - 1))
    half = Z95 * deviation / sqrt(count)
    return mean - half, mean + half


def wilson_interval(successes: float, trials: int) -> tuple[float, float]:
    """95% score interval of a proportion (Wilson 1927); (0, 1) for no trials.

    >>> [round(bound, 4) for bound in wilson_interval(8, 10)]
    [0.4902, 0.9433]
    """
    if trials == 0:
        return 0.0, 1.0
    share = successes / trials
    scale = 1 + Z95**2 / trials
    centre = (share + Z95**2 / (2 * trials)) / scale
    half = Z95 * sqrt(share * (1 - share) / trials + Z95**2 / (4 * trials**2)) / scale
    # Rounding may leave the share just outside where all or none succeed.
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def order_statistics(values: Sequence[int], most: int = 64) -> list[int]:
    """At most `most` of the values, evenly spaced in ascending order from the least to the greatest.

    >>> order_statistics([9, 1, 5, 3, 7], most=3)
    [1, 5, 9]
    """
    ascending = sorted(values)
    if len(ascending) <= most:
        return ascending
    return [ascending[round(index * (len(ascending) - 1) / (most - 1))] for index in range(most)]
