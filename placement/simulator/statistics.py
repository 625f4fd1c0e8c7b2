"""Paired comparisons: ratios over seeds with Student intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist, fmean, stdev

# Student's 97.5% quantile for 1 to 8 degrees of freedom; beyond, the Cornish-Fisher expansion errs by less than 0.001.
SMALL = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A mean with its 95% interval."""

    mean: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]" if self.seeds > 1 else f"{self.mean:.3f}"


def paired_ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """Mean over seeds of over / under; both met the same random numbers, so their difficulty cancels."""
    return interval([a / b for a, b in zip(over, under, strict=True)])


def interval(values: Sequence[float]) -> Ratio:
    """Mean and 95% interval of Student; of one value alone nothing is known: infinite."""
    mean = fmean(values)
    half = student(len(values) - 1) * stdev(values) / sqrt(len(values)) if len(values) > 1 else float("inf")
    return Ratio(mean=mean, low=mean - half, high=mean + half, seeds=len(values))


def student(freedom: int) -> float:
    """The 97.5% quantile of Student's distribution."""
    if freedom <= len(SMALL):
        return SMALL[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2
