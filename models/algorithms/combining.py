"""Several reward terms: advantages of their weighted sum, or the weighted sum of each term's advantages.

Shapes: N completions, G groups, T completion tokens.
"""

from collections.abc import Callable

import numpy as np

from models.algorithms.config import DrGrpo, GroupRelative, Grpo, Rloo
from models.algorithms.dr_grpo import centred
from models.algorithms.experience import Advantages, Experience, ScoredGroups
from models.algorithms.groups import MIN_STD, Floats, Integers, Mask, group_statistics
from models.algorithms.grpo import standardised
from models.algorithms.rloo import left_out
from models.algorithms.shaping import penalties

Relative = Callable[[Floats, Integers, int], Floats]


def group_relative(experience: Experience, algorithm: GroupRelative) -> Advantages:
    """Give all tokens of a completion its advantage among its group.

    Where terms are normalised one by one, what is taken for length and divergence is centred alone: dividing it by its
    own deviation would undo its factor.
    """
    scored = experience.scored
    relative, taken_N = _relative(algorithm), penalties(experience, algorithm, algorithm.kl)
    if algorithm.combine == "sum_then_normalise":
        advantages_N = relative(scored.total_N - taken_N, scored.group_N, scored.num_groups)
    else:
        unscaled = centred if relative is standardised else relative
        taken_N[~scored.is_scored] = np.nan
        advantages_N = _sum_of_terms(scored, relative) - unscaled(taken_N, scored.group_N, scored.num_groups)
    return Advantages(np.repeat(advantages_N, scored.lengths_N))


def informative(scored: ScoredGroups, algorithm: GroupRelative) -> Mask:
    """Find the groups whose rewards, as they were given, make advantages other than 0."""
    if algorithm.combine == "sum_then_normalise":
        return group_statistics(scored.total_N, scored.group_N, scored.num_groups).differ
    teaches_N = np.abs(_sum_of_terms(scored, _relative(algorithm))) >= MIN_STD
    informative_G: Mask = np.bincount(scored.group_N[teaches_N], minlength=scored.num_groups) > 0
    return informative_G


def _relative(algorithm: GroupRelative) -> Relative:
    match algorithm:
        case Grpo():
            return standardised
        case DrGrpo():
            return centred
        case Rloo():
            return left_out
        case _:
            raise AssertionError(f"{algorithm!r} is no algorithm whose baseline is the group")


def _sum_of_terms(scored: ScoredGroups, relative: Relative) -> Floats:
    sum_N = np.where(scored.is_scored, 0.0, np.nan)
    for term in scored.terms:
        rewards_N = np.where(scored.is_scored, term.rewards_N, np.nan)  # who lacks another term has left the group
        sum_N += term.weight * relative(rewards_N, scored.group_N, scored.num_groups)
    return sum_N
