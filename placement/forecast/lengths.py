"""Random sampling of work units: the length of a unit's longest sequence, and its total number of tokens.

Shapes: B bootstrap resamples, U units, L lengths of a resample.
"""

from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np

from placement.records import Demand, Floats


@cache
def _normal_table() -> tuple[Floats, Floats]:
    """Return values of z from -6 to 6, and the share of the standard normal distribution below each.

    Decisions in a run's journal are computed again from exactly these numbers. If one sample changed its rank, another
    worker would move. Therefore the table must not change, and neither may its source (SciPy's values differ by 1e-16).
    """
    z = np.linspace(-6, 6, 1201)
    return z, np.array([NormalDist().cdf(float(at)) for at in z])


def share_below(z: Floats) -> Floats:
    """Return the share of the standard normal distribution below z, to four digits."""
    return np.asarray(np.interp(z, *_normal_table()))


def z_of_share(share: Floats) -> Floats:
    """Return the quantile z of the standard normal distribution for each share, limited to -6 to 6."""
    z, known = _normal_table()
    return np.asarray(np.interp(share, known, z))


PRIOR_LENGTHS = 8
"""Number of observed lengths to which the prior is equivalent."""

PRIOR_SIGMA = 0.5
"""Minimum standard deviation of the prior, which is log-normal around the observed median. A small sample does not show
the tail of the distribution."""


@dataclass(frozen=True, slots=True)
class UnitSamples:
    """Random samples of units, with one row for each bootstrap resample."""

    longest_BU: Floats
    """Tokens of the longest sequence, which is the number of decoding steps of the unit."""
    tokens_BU: Floats
    """Tokens of all sequences of the unit."""


def sample_units(demand: Demand, units: int, *, bootstraps: int, seed: tuple[int, ...]) -> UnitSamples:
    """Sample `units` units from each of `bootstraps` resamples of the role's recent lengths, mixed with a robust prior.

    The longest of a unit's b sequences is the resample's quantile at u^(1/b), with u uniform. The sum of the others
    follows from the central limit theorem, over the lengths below the longest. So the cost does not depend on b. The
    lengths of a unit share a normal variable (Gaussian copula with correlation `likeness`), which shifts the longest
    length and the sum together.
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
    return UnitSamples(longest_BU=longest_BU, tokens_BU=tokens_BU)


def _shifts(drift: float, *, bootstraps: int, rng: np.random.Generator) -> Floats:
    """Return factors by which the lengths of the coming stage may differ from the last ones.

    The factors have mean 1 and are evenly spaced in probability.
    """
    z_B = rng.permutation(z_of_share((np.arange(bootstraps) + 0.5) / bootstraps))
    factors_B = np.exp(drift * z_B)
    return np.asarray(factors_B / factors_B.mean())


def _highest(uniform_BU: Floats, shared_BU: Floats, *, sequences: int, likeness: float) -> Floats:
    """Return the quantile of the longest sequence of each unit."""
    highest_BU = uniform_BU ** (1 / sequences)
    if likeness == 0:
        return np.asarray(highest_BU)
    shared_BU = np.sqrt(likeness) * shared_BU + np.sqrt(1 - likeness) * z_of_share(highest_BU)
    return share_below(shared_BU)


def _resamples(lengths_n: Floats, *, bootstraps: int, rng: np.random.Generator) -> Floats:
    """Return sorted resamples of the lengths, mixed with samples of a log-normal around their median."""
    lengths_n = np.maximum(lengths_n, 1.0) if lengths_n.size else np.ones(1)
    drawn_Bn = rng.choice(lengths_n, size=(bootstraps, lengths_n.size))
    logs_n = np.log(lengths_n)
    # A role without generated text (lengths of one token) has no tail.
    sigma = max(float(logs_n.std()), PRIOR_SIGMA) if lengths_n.max() > 1 else 0.0
    prior_BP = np.exp(np.median(logs_n) + sigma * rng.standard_normal((bootstraps, PRIOR_LENGTHS)))
    return np.sort(np.concatenate([drawn_Bn, prior_BP], axis=1), axis=1)
