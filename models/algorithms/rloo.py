"""Leave-one-out advantages (RLOO, arXiv 2402.14740, eq. 8).

Shapes: N completions, G groups. A missing reward is NaN; it counts in no mean and its advantage is NaN.
"""

import numpy as np

from models.algorithms.dr_grpo import centred
from models.algorithms.groups import Floats, Integers, group_statistics


def left_out(rewards_N: Floats, group_N: Integers, num_groups: int) -> Floats:
    """Subtract from each reward the mean of its group's others: n / (n - 1) times what the group's mean leaves.

    >>> left_out(np.array([3.0, 0.0, 0.0]), np.array([0, 0, 0]), 1)
    array([ 3. , -1.5, -1.5])
    """
    count_G = group_statistics(rewards_N, group_N, num_groups).count_G
    factor_G = count_G / np.maximum(count_G - 1, 1)
    left_out_N: Floats = centred(rewards_N, group_N, num_groups) * factor_G[group_N]
    return left_out_N
