"""What remains of units under way.

Units that have finished are the short ones; those still under way are known to be longer than they have taken so far.

Shapes: B bootstraps, P drawn units, F units in flight.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BEYOND = 0.25
"""A unit that has outlasted all that was drawn takes this share of its time again, on average."""


def residuals(pool_BP: Floats, elapsed_F: Floats, *, seed: tuple[int, ...]) -> Floats:
    """Draw T - e from the units T of the pool that last longer than e, for each unit under way since e seconds."""
    rng = np.random.default_rng(seed)
    sorted_BP = np.sort(pool_BP, axis=1)
    uniform_BF = rng.random((pool_BP.shape[0], elapsed_F.size))
    size = pool_BP.shape[1]
    shorter_BF = np.stack([np.searchsorted(row, elapsed_F, side="right") for row in sorted_BP])
    rank_BF = np.minimum(shorter_BF + ((size - shorter_BF) * uniform_BF).astype(np.int64), size - 1)
    left_BF = np.take_along_axis(sorted_BP, rank_BF, axis=1) - elapsed_F
    return np.where(shorter_BF < size, left_BF, -BEYOND * np.log1p(-uniform_BF) * elapsed_F)
