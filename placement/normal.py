"""The standard normal distribution on a grid; numpy has none."""

from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def normal_cdf(z: Floats) -> Floats:
    """Share of the distribution below z, to four digits."""
    grid, share = _grid()
    return np.asarray(np.interp(z, grid, share))


def normal_quantile(share: Floats) -> Floats:
    """The z below which such a share lies, between -6 and 6."""
    grid, known = _grid()
    return np.asarray(np.interp(share, known, grid))


@cache
def _grid() -> tuple[Floats, Floats]:
    grid = np.linspace(-6, 6, 1201)
    return grid, np.array([NormalDist().cdf(float(z)) for z in grid])
