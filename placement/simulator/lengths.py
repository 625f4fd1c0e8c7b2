"""How long answers are: heavy-tailed lengths, alike within a group.

Suffixes: U units of work, S sequences of a unit.
"""

from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BIMODAL_LONG = 0.2  # share of answers of the long kind
BIMODAL_FACTOR = 8.0
BIMODAL_SIGMA = 0.25  # spread within a kind, in log space


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens with median 1, to be scaled."""

    name: str
    shape: Literal["lognormal", "bimodal", "pareto"]
    parameter: float
    """Sigma of the log-normal, alpha of Pareto's, factor between the two kinds of a bimodal one."""
    correlation: float = 0.3
    """Of two answers to one prompt, in the normal variable behind the length."""
    truncated: float = 0.02
    """Share of the mass at the cap."""


KNOWN = {
    known.name: known
    for known in (
        *(Lengths(f"lognormal-{sigma}", "lognormal", sigma) for sigma in (0.5, 0.8, 1.0, 1.2)),
        Lengths("lognormal-1.0-cut", "lognormal", 1.0, truncated=0.1),
        Lengths("lognormal-0.8-alone", "lognormal", 0.8, correlation=0.0),
        Lengths("lognormal-0.8-alike", "lognormal", 0.8, correlation=0.7),
        Lengths("bimodal", "bimodal", BIMODAL_FACTOR),
        Lengths("pareto-1.5", "pareto", 1.5, truncated=0.01),
        Lengths("pareto-2.5", "pareto", 2.5, truncated=0.01),
    )
}
"""The distributions that the aims speak of, by name."""


def draw(lengths: Lengths, rng: np.random.Generator, *, units: int, groups: int, group_size: int) -> Floats:
    """Lengths [U, S] with S = groups * group_size and median 1, before rounding to tokens."""
    shared = rng.standard_normal((units, groups, 1))
    own = rng.standard_normal((units, groups, group_size))
    normal = np.sqrt(lengths.correlation) * shared + np.sqrt(1 - lengths.correlation) * own
    return np.minimum(_shaped(lengths, normal), cap(lengths)).reshape(units, groups * group_size)


def cap(lengths: Lengths) -> float:
    """The longest length, in medians: the quantile above which the truncated mass lies."""
    z = normal_quantile(1 - lengths.truncated)
    match lengths.shape:
        case "lognormal":
            return float(np.exp(lengths.parameter * z))
        case "pareto":
            return float((2 * lengths.truncated) ** (-1 / lengths.parameter))
        case "bimodal":
            return float(lengths.parameter * np.exp(BIMODAL_SIGMA * z))


def _shaped(lengths: Lengths, normal: Floats) -> Floats:
    match lengths.shape:
        case "lognormal":
            return np.asarray(np.exp(lengths.parameter * normal))
        case "pareto":
            above = np.maximum(1 - normal_share(normal), 1e-12)
            return np.asarray((2 * above) ** (-1 / lengths.parameter))
        case "bimodal":
            long = normal > normal_quantile(1 - BIMODAL_LONG)
            return np.asarray(np.where(long, lengths.parameter, 1.0) * np.exp(BIMODAL_SIGMA * normal))


def normal_share(z: Floats) -> Floats:
    """Share of a normal population below z (Abramowitz and Stegun 7.1.26, absolute error below 1.5e-7)."""
    x = np.abs(z) / np.sqrt(2)
    t = 1 / (1 + 0.3275911 * x)
    polynomial = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    erf = 1 - polynomial * np.exp(-x * x)
    return np.asarray(0.5 * (1 + np.sign(z) * erf))


def normal_quantile(share: float) -> float:
    """The z below which a share of a normal population lies."""
    return NormalDist().inv_cdf(share)
