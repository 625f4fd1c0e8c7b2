"""Group-relative advantages (GRPO, arXiv 2402.03300, section 4.1.2).

Shapes: N completions, G groups. A missing reward is NaN; it counts in no mean and its advantage is NaN.
"""

from models.algorithms.dr_grpo import centred
from models.algorithms.groups import Floats, Integers, group_statistics

EPSILON = 1e-6
"""Added to the standard deviation in the denominator."""


def standardised(rewards_N: Floats, group_N: Integers, num_groups: int) -> Floats:
    """Centre rewards on their group's mean, over its population deviation; equal rewards teach nothing: 0.

    >>> standardised(np.array([1.0, 0.0, 5.0, 5.0]), np.array([0, 0, 1, 1]), 2).round(3)
    array([ 1., -1.,  0.,  0.])
    """
    std_G = group_statistics(rewards_N, group_N, num_groups).std_G
    standardised_N: Floats = centred(rewards_N, group_N, num_groups) / (std_G + EPSILON)[group_N]
    return standardised_N
