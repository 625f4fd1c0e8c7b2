"""How new rewards or advantages compare with stored ones. Torch-free.

N completions in the order of their shards; NaN is missing.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def compare_rewards(stored_N: Floats, new_N: Floats) -> dict[str, float]:
    """Describe new rewards beside the stored ones of the same completions.

    A mean over nothing is left out, and so is the correlation where one side is the same everywhere.
    """
    same_N = (stored_N == new_N) | (np.isnan(stored_N) & np.isnan(new_N))
    return {
        "completions": float(len(new_N)),
        "missing": float(np.isnan(new_N).sum()),
        "changed_fraction": float((~same_N).mean()) if len(new_N) else 0.0,
        **_mean("stored_reward_mean", stored_N),
        **_mean("reward_mean", new_N),
        **correlation(stored_N, new_N),
    }


def correlation(left_N: Floats, right_N: Floats) -> dict[str, float]:
    """Pearson's correlation of what both sides have; none where one side does not vary."""
    both_N = np.isfinite(left_N) & np.isfinite(right_N)
    left_K, right_K = left_N[both_N], right_N[both_N]
    if len(left_K) < 2 or np.ptp(left_K) == 0 or np.ptp(right_K) == 0:
        return {}
    left_K, right_K = left_K - left_K.mean(), right_K - right_K.mean()
    value = float(left_K @ right_K / np.sqrt((left_K @ left_K) * (right_K @ right_K)))
    return {"correlation": max(-1.0, min(1.0, value))}


def _mean(name: str, values_N: Floats) -> dict[str, float]:
    found_N = values_N[np.isfinite(values_N)]
    return {name: float(found_N.mean())} if len(found_N) else {}
