"""Interval estimates for counts."""

from math import sqrt

Z95 = 1.959963984540054  # 97.5% quantile of the standard normal


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
    return max(0.0, centre - half), min(1.0, centre + half)
