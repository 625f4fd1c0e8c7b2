"""Random sampling of work units from recent sequence lengths, as input for predictions of stage times.

For each sampled unit the functions return the length of its longest sequence and its total number of tokens.

Shapes: B bootstrap resamples, U units, L lengths of a resample.
"""

from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np

from rheostat.placement.records import Demand, Floats


@cache
def _normal_table() -> tuple[Floats, Floats]:
    """Return a table of the standard normal distribution: values of z from -6 to 6, and the probability below each z.

    The table and the library that computes it must not change. Decisions that a run has stored are reproduced from
    exactly these numbers, and a difference of 1e-16, as with SciPy's values, can reverse the order of two samples and
    thus lead to another decision.
    """
    z = np.linspace(-6, 6, 1201)
    return z, np.array([NormalDist().cdf(float(at)) for at in z])


def share_below(z: Floats) -> Floats:
    """Return the probability below z in the standard normal distribution, with an accuracy of four digits."""
    return np.asarray(np.interp(z, *_normal_table()))


def z_of_share(share: Floats) -> Floats:
    """Return the standard normal quantile z for each probability in `share`, clipped to the range -6 to 6."""
    z, known = _normal_table()
    return np.asarray(np.interp(share, known, z))


PRIOR_LENGTHS = 8
"""Weight of the prior distribution of lengths, given as a number of observed lengths with the same weight."""

PRIOR_SIGMA = 0.5
"""Minimum standard deviation of the log length in the prior, a log-normal distribution around the observed median. A
small sample may contain none of the rare long sequences, so its own standard deviation may be too small."""


@dataclass(frozen=True, slots=True)
class UnitSamples:
    """Randomly sampled work units. Each row of an array belongs to one bootstrap resample of the lengths."""

    longest_BU: Floats
    """Length of the longest sequence of each unit in tokens. This is also the number of decoding steps of the unit."""
    tokens_BU: Floats
    """Total number of tokens of all sequences in each unit."""


def sample_units(demand: Demand, units: int, *, bootstraps: int, seed: tuple[int, ...]) -> UnitSamples:
    """Sample `units` work units from each of `bootstraps` resamples of the recent lengths, mixed with a prior.

    For a unit with b sequences, the longest length is the quantile of the resample at u^(1/b), with u uniform. The sum
    of the other lengths is sampled from a normal approximation (central limit theorem) over the lengths below the
    longest. Therefore the computation time does not depend on b. Lengths in the same unit are correlated through a
    shared normal variable (Gaussian copula with correlation `likeness`), which affects the longest length and the sum.
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
    """Return a random factor for each resample, by which lengths in the next stage may differ from recent lengths.

    The factors have mean 1. Their logarithms are evenly spaced quantiles of a normal distribution with standard
    deviation `drift`.
    """
    z_B = rng.permutation(z_of_share((np.arange(bootstraps) + 0.5) / bootstraps))
    factors_B = np.exp(drift * z_B)
    return np.asarray(factors_B / factors_B.mean())


def _highest(uniform_BU: Floats, shared_BU: Floats, *, sequences: int, likeness: float) -> Floats:
    """Return the quantile (0 to 1) of the resample that gives the length of the longest sequence of each unit."""
    highest_BU = uniform_BU ** (1 / sequences)
    if likeness == 0:
        return np.asarray(highest_BU)
    shared_BU = np.sqrt(likeness) * shared_BU + np.sqrt(1 - likeness) * z_of_share(highest_BU)
    return share_below(shared_BU)


def _resamples(lengths_n: Floats, *, bootstraps: int, rng: np.random.Generator) -> Floats:
    """Return sorted bootstrap resamples of the lengths, mixed with samples of a log-normal prior around their
    median."""
    lengths_n = np.maximum(lengths_n, 1.0) if lengths_n.size else np.ones(1)
    drawn_Bn = rng.choice(lengths_n, size=(bootstraps, lengths_n.size))
    logs_n = np.log(lengths_n)
    # If all lengths are one token, the role generates no text, and no prior for long sequences is needed.
    sigma = max(float(logs_n.std()), PRIOR_SIGMA) if lengths_n.max() > 1 else 0.0
    prior_BP = np.exp(np.median(logs_n) + sigma * rng.standard_normal((bootstraps, PRIOR_LENGTHS)))
    return np.sort(np.concatenate([drawn_Bn, prior_BP], axis=1), axis=1)
