"""Bootstraps of the work in units: how long a unit's longest sequence is, and how many tokens it has in all.

Shapes: B bootstraps, U units, L lengths of a resample.
"""

from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np

from placement.records import Demand, Floats


@cache
def _normal_table() -> tuple[Floats, Floats]:
    """Return z from -6 to 6 and the shares below them.

    Decisions that a journal keeps are made again from these very figures, to the last digit: where a draw falls on the
    other side of a rank, another worker moves. So the table stays, and so does its source (SciPy's is 1e-16 away).
    """
    z = np.linspace(-6, 6, 1201)
    return z, np.array([NormalDist().cdf(float(at)) for at in z])


def share_below(z: Floats) -> Floats:
    """Share of the standard normal distribution below z, to four digits."""
    return np.asarray(np.interp(z, *_normal_table()))


def z_of_share(share: Floats) -> Floats:
    """The z below which such a share lies, between -6 and 6."""
    z, known = _normal_table()
    return np.asarray(np.interp(share, known, z))


PRIOR_LENGTHS = 8
"""The prior counts as so many observed lengths."""

PRIOR_SIGMA = 0.5
"""The prior is log-normal about the observed median, at least so wide: a small sample knows nothing of its tail."""


@dataclass(frozen=True, slots=True)
class UnitDraws:
    """Units as they may turn out, one row per bootstrap."""

    longest_BU: Floats
    """Tokens of the longest sequence: decoding steps of the unit."""
    tokens_BU: Floats
    """Tokens of all its sequences."""


def draw_units(demand: Demand, units: int, *, bootstraps: int, seed: tuple[int, ...]) -> UnitDraws:
    """Draw `units` units from `bootstraps` resamples of the role's recent lengths, mixed with a robust prior.

    A unit's longest of b sequences is the resample's quantile at u^(1/b); the others are drawn from what lies below it,
    their sum by the central limit theorem. So a draw costs the same whatever b is. Lengths of one unit share a normal
    variable (a Gaussian copula of correlation `likeness`), which shifts the longest and the sum together.
    """
    rng = np.random.default_rng(seed)
    lengths_BL = _resamples(np.asarray(demand.lengths, dtype=np.float64), bootstraps=bootstraps, rng=rng)
    lengths_BL = lengths_BL * _shifts(demand.drift, bootstraps=bootstraps, rng=rng)[:, None]
    size = lengths_BL.shape[1]
    counts_L = np.arange(1, size + 1)
    mean_BL = np.cumsum(lengths_BL, axis=1) / counts_L
    variance_BL = np.maximum(np.cumsum(lengths_BL**2, axis=1) / counts_L - mean_BL**2, 0)
    b = max(demand.sequences, 1)
    shared_BU = rng.standard_normal((bootstraps, units))
    highest_BU = _highest(rng.random((bootstraps, units)), shared_BU, sequences=b, likeness=demand.likeness)
    rank_BU = np.minimum((highest_BU * size).astype(np.int64), size - 1)
    longest_BU = np.take_along_axis(lengths_BL, rank_BU, axis=1)
    tau_B1 = np.sqrt(np.log1p(demand.likeness * variance_BL[:, -1:] / mean_BL[:, -1:] ** 2))
    level_BU = np.exp(tau_B1 * shared_BU - tau_B1**2 / 2)
    rest_BU = (b - 1) * level_BU * np.take_along_axis(mean_BL, rank_BU, axis=1)
    spread_BU = np.sqrt((b - 1) * (1 - demand.likeness) * np.take_along_axis(variance_BL, rank_BU, axis=1))
    rest_BU += spread_BU * rng.standard_normal(rest_BU.shape)
    tokens_BU = longest_BU + np.clip(rest_BU, (b - 1) * lengths_BL[:, :1], (b - 1) * longest_BU)
    return UnitDraws(longest_BU=longest_BU, tokens_BU=tokens_BU)


def _shifts(drift: float, *, bootstraps: int, rng: np.random.Generator) -> Floats:
    """By how much the coming stage's lengths may differ from the last ones: factors of mean 1, evenly spread."""
    z_B = rng.permutation(z_of_share((np.arange(bootstraps) + 0.5) / bootstraps))
    factors_B = np.exp(drift * z_B)
    return np.asarray(factors_B / factors_B.mean())


def _highest(uniform_BU: Floats, shared_BU: Floats, *, sequences: int, likeness: float) -> Floats:
    """Quantile at which the longest of a unit's sequences lies."""
    highest_BU = uniform_BU ** (1 / sequences)
    if likeness == 0:
        return np.asarray(highest_BU)
    shared_BU = np.sqrt(likeness) * shared_BU + np.sqrt(1 - likeness) * z_of_share(highest_BU)
    return share_below(shared_BU)


def _resamples(lengths_n: Floats, *, bootstraps: int, rng: np.random.Generator) -> Floats:
    """Sorted resamples of the lengths and of a log-normal about their median."""
    lengths_n = np.maximum(lengths_n, 1.0) if lengths_n.size else np.ones(1)
    drawn_Bn = rng.choice(lengths_n, size=(bootstraps, lengths_n.size))
    logs_n = np.log(lengths_n)
    # A role that writes nothing (lengths of one token) has no tail to guard against.
    sigma = max(float(logs_n.std()), PRIOR_SIGMA) if lengths_n.max() > 1 else 0.0
    prior_BP = np.exp(np.median(logs_n) + sigma * rng.standard_normal((bootstraps, PRIOR_LENGTHS)))
    return np.sort(np.concatenate([drawn_Bn, prior_BP], axis=1), axis=1)
