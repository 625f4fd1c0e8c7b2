"""Generalised advantage estimation (GAE, arXiv 1506.02438, eq. 11 and 16).

Shapes: N completions, T completion tokens.
"""

import numpy as np

from models.algorithms.groups import Floats, Integers
from models.algorithms.tokens import discounted_sums, last_tokens


def generalised_advantages(
    rewards_T: Floats, values_T: Floats, lengths_N: Integers, *, gamma: float, lam: float
) -> Floats:
    """Sum up (γλ)^k δ_{t+k} with δ_t = r_t + γ V_{t+1} - V_t; behind the last token the value is 0."""
    deltas_T = rewards_T - values_T
    next_T = np.zeros_like(deltas_T)
    next_T[:-1] = values_T[1:]
    next_T[last_tokens(lengths_N)] = 0.0
    next_T *= gamma
    deltas_T += next_T
    return discounted_sums(deltas_T, lengths_N, gamma * lam)
