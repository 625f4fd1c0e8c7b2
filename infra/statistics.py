"""Confidence intervals and quantiles. SciPy is only imported inside functions, because its import takes 0.3 s."""

from math import comb, isclose, sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # numpy costs a command that lists runs more than the command itself
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

Z95 = 1.959963984540054  # normal_quantile(0.975)


def mean_interval(total: float, squares: float, count: int) -> tuple[float, float]:
    """Return the 95% confidence interval of a mean, from the sum `total`, the sum of squares `squares` and the number
    of values `count`. If every value is 0 or 1, this is Wilson's interval, otherwise the normal interval.

    >>> mean_interval(8, 8, 10) == wilson_interval(8, 10)
    True
    >>> [round(bound, 3) for bound in mean_interval(30, 350, 3)]  # 5, 10 and 15
    [4.342, 15.658]
    >>> mean_interval(4.5, 20.25, 1)  # a single value other than 0 or 1 has no spread
    (4.5, 4.5)
    """
    if isclose(total, squares, abs_tol=1e-9) or (count < 2 and 0 <= total <= 1):
        return wilson_interval(min(max(total, 0.0), count), count)
    mean = total / count
    deviation = sqrt(max(0.0, squares - count * mean**2) / max(1, count - 1))
    half = Z95 * deviation / sqrt(count)
    return mean - half, mean + half


def wilson_interval(successes: float, trials: int) -> tuple[float, float]:
    """Return the 95% confidence interval of a proportion by Wilson's score method (1927), or (0, 1) if there are no
    trials.

    The number of successes may be a rounded sum. `scipy.stats` requires whole numbers and takes a second to import.

    >>> [round(bound, 4) for bound in wilson_interval(8, 10)]
    [0.4902, 0.9433]
    """
    if trials == 0:
        return 0.0, 1.0
    share = successes / trials
    scale = 1 + Z95**2 / trials
    centre = (share + Z95**2 / (2 * trials)) / scale
    half = Z95 * sqrt(share * (1 - share) / trials + Z95**2 / (4 * trials**2)) / scale
    # Because of rounding, the share may be just outside if all or no trials succeed.
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


def pass_at(k: int, *, samples: int, right: int) -> float:
    """Return an unbiased estimate of pass@k, the probability that at least one of k samples is right. `right` of the
    `samples` are right.

    Implements Chen et al. 2021, arXiv 2107.03374, eq. 1.

    >>> [round(pass_at(k, samples=4, right=1), 3) for k in (1, 2, 4)]
    [0.25, 0.5, 1.0]
    """
    choices = comb(samples, k)
    return (choices - comb(samples - right, k)) / choices


def normal_cdf(z: "ArrayLike") -> "NDArray[np.float64]":
    """Return the cumulative distribution function of the standard normal distribution at each element of `z`.

    >>> float(normal_cdf(0))
    0.5
    """
    import numpy as np
    from scipy.special import ndtr

    return np.asarray(ndtr(z))


def normal_quantile(share: "ArrayLike") -> "NDArray[np.float64]":
    """Return the quantile of the standard normal distribution for each probability in `share`. The quantiles of 0 and 1
    are infinite.

    >>> round(float(normal_quantile(0.975)), 6)
    1.959964
    """
    import numpy as np
    from scipy.special import ndtri

    return np.asarray(ndtri(share))
