"""What remains of units under way, and whether this stage's units are longer than the last ones.

Units that have finished are the short ones; those still under way are known to be longer than they have taken so far.

Shapes: B bootstraps, P drawn units, F units in flight, S factors.
"""

import numpy as np
from numpy.typing import NDArray

from placement.normal import normal_cdf

Floats = NDArray[np.float64]

BEYOND = 0.25
"""A unit that has outlasted all that was drawn takes this share of its time again, on average."""
FACTORS_S = np.geomspace(1 / 8, 8, 49)
"""By how much a stage's units may differ from the last ones."""
FACTOR_SIGMA = 0.4
"""Of the log-normal belief in these factors before the stage began."""
LEAST_SPREAD = 0.15
"""Units differ at least so much, in log space, whatever a small sample says."""


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


def stage_factor(pool_BP: Floats, elapsed_F: Floats, *, done: int, done_seconds: float) -> float:
    """Return by how much longer than drawn this stage's units are, from those done and those still under way.

    The posterior mean over `FACTORS_S`: units are log-normal; those done took `done_seconds` each on average, and each
    one under way lasts longer than it has so far (censored observations, so that early finishers do not bias it).
    """
    logs = np.log(np.maximum(pool_BP, 1e-9))
    mean, sigma = float(logs.mean()), max(float(logs.std()), LEAST_SPREAD)
    shift_S = np.log(FACTORS_S)
    belief_S = -(shift_S**2) / (2 * FACTOR_SIGMA**2)
    if done and done_seconds > 0:
        # The mean of a log-normal lies sigma²/2 above its median.
        gap_S = np.log(done_seconds) - sigma**2 / 2 - mean - shift_S
        belief_S = belief_S - done * gap_S**2 / (2 * sigma**2)
    if elapsed_F.size:
        outlived_FS = (np.log(np.maximum(elapsed_F, 1e-9))[:, None] - mean - shift_S) / sigma
        belief_S = belief_S + np.log(np.maximum(1 - normal_cdf(outlived_FS), 1e-12)).sum(axis=0)
    weight_S = np.exp(belief_S - belief_S.max())
    return float((weight_S * FACTORS_S).sum() / weight_S.sum())
