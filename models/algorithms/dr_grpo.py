"""Advantages that are only centred (Dr. GRPO, arXiv 2503.20783, section 3.2).

Shapes: N completions, G groups. A missing reward is NaN; it counts in no mean and its advantage is NaN.
"""

import numpy as np

from models.algorithms.groups import Floats, Integers, group_statistics


def centred(rewards_N: Floats, group_N: Integers, num_groups: int) -> Floats:
    """Centre rewards on their group's mean; equal rewards teach nothing: exactly 0, whatever floats make of the mean.

    >>> centred(np.array([1.0, 0.0, 5.0]), np.array([0, 0, 1]), 2)
    array([ 0.5, -0.5,  0. ])
    """
    groups = group_statistics(rewards_N, group_N, num_groups)
    centred_N: Floats = rewards_N - groups.mean_G[group_N]
    centred_N[np.isfinite(rewards_N) & ~groups.differ[group_N]] = 0.0
    return centred_N
