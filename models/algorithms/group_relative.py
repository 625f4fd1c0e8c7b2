"""Advantages without a critic: GRPO, Dr. GRPO and RLOO, which compare rewards within the group of a prompt, and
REINFORCE++.

GRPO, Dr. GRPO and RLOO support one or several reward terms. REINFORCE++ (arXiv 2501.03262) normalizes over all tokens;
its baseline variant first subtracts the mean of the group. Shapes: N completions, G groups, T completion tokens. A
missing reward is NaN. It is excluded from means, and its advantage is NaN.
"""

from collections.abc import Callable
from typing import cast

import numpy as np

from rheostat.infra.plugins import find_target
from rheostat.models.algorithms.experience import Advantages, Experience, ScoredGroups
from rheostat.models.algorithms.ragged import MIN_STD, discounted_sums, group_statistics, normalize_tokens
from rheostat.models.algorithms.shaping import penalties, token_rewards
from rheostat.models.config.algorithms import GroupRelative, ReinforcePlusPlus, ReinforcePlusPlusBaseline
from rheostat.models.records.columns import Floats, Integers, Mask


def dr_grpo(rewards_N: Floats, group_N: Integers, num_groups: int) -> Floats:
    """Subtract from each reward the mean of its group (Dr. GRPO, arXiv 2503.20783, section 3.2).

    `group_N` is the group index of each reward. Groups with equal rewards get exactly 0, regardless of rounding in the
    mean.

    >>> dr_grpo(np.array([1.0, 0.0, 5.0]), np.array([0, 0, 1]), 2)
    array([ 0.5, -0.5,  0. ])
    """
    groups = group_statistics(rewards_N, group_N, num_groups)
    centred_N: Floats = rewards_N - groups.mean_G[group_N]
    centred_N[np.isfinite(rewards_N) & ~groups.differ[group_N]] = 0.0
    return centred_N


EPSILON = 1e-6
"""Constant that is added to a standard deviation before rewards are divided by it, to avoid division by 0."""


def grpo(rewards_N: Floats, group_N: Integers, num_groups: int) -> Floats:
    """Subtract from each reward the mean of its group, and divide by the group's standard deviation (GRPO, arXiv
    2402.03300, section 4.1.2).

    `group_N` is the group index of each reward. Groups with equal rewards get 0.

    >>> grpo(np.array([1.0, 0.0, 5.0, 5.0]), np.array([0, 0, 1, 1]), 2).round(3)
    array([ 1., -1.,  0.,  0.])
    """
    std_G = group_statistics(rewards_N, group_N, num_groups).std_G
    standardised_N: Floats = dr_grpo(rewards_N, group_N, num_groups) / (std_G + EPSILON)[group_N]
    return standardised_N


def grpo_over_batch(rewards_N: Floats, group_N: Integers, num_groups: int) -> Floats:
    """Subtract from each reward the mean of its group, and divide by the standard deviation of all rewards of the batch
    (Flow-GRPO, arXiv 2505.05470).

    `group_N` is the group index of each reward.

    >>> grpo_over_batch(np.array([1.0, 0.0, 5.0, 6.0]), np.array([0, 0, 1, 1]), 2).round(3)
    array([ 0.196, -0.196, -0.196,  0.196])
    """
    std = group_statistics(rewards_N, np.zeros_like(group_N), 1).std_G
    standardised_N: Floats = dr_grpo(rewards_N, group_N, num_groups) / (std + EPSILON)
    return standardised_N


def rloo(rewards_N: Floats, group_N: Integers, num_groups: int) -> Floats:
    """Subtract from each reward the mean of the other rewards in its group (RLOO, arXiv 2402.14740, eq. 8).

    `group_N` is the group index of each reward. The result equals n / (n - 1) times the difference from the mean of a
    group of n rewards.

    >>> rloo(np.array([3.0, 0.0, 0.0]), np.array([0, 0, 0]), 1)
    array([ 3. , -1.5, -1.5])
    """
    count_G = group_statistics(rewards_N, group_N, num_groups).count_G
    factor_G = count_G / np.maximum(count_G - 1, 1)
    left_out_N: Floats = dr_grpo(rewards_N, group_N, num_groups) * factor_G[group_N]
    return left_out_N


Relative = Callable[[Floats, Integers, int], Floats]
"""Function that computes an advantage for each reward, given the rewards, the group index of each reward, and the
number of groups. The advantage of a reward of NaN is NaN."""


def group_relative(experience: Experience, algorithm: GroupRelative) -> Advantages:
    """Compute the advantage of each completion relative to its group, and assign it to all tokens of the completion.

    If each reward term is normalized separately, the penalties for length and divergence are centered but not divided
    by their standard deviation, because the division would cancel their coefficients.
    """
    scored = experience.scored
    relative, penalties_N = _relative(algorithm), penalties(experience, algorithm, algorithm.kl)
    if algorithm.combine == "sum_then_normalise":
        advantages_N = relative(scored.total_N - penalties_N, scored.group_N, scored.num_groups)
    else:
        unscaled = dr_grpo if relative in (grpo, grpo_over_batch) else relative
        penalties_N[~scored.is_scored] = np.nan
        advantages_N = _sum_of_terms(scored, relative) - unscaled(penalties_N, scored.group_N, scored.num_groups)
    if algorithm.advantage_clip is not None:
        advantages_N = np.clip(advantages_N, -algorithm.advantage_clip, algorithm.advantage_clip)
    return Advantages(np.repeat(advantages_N, scored.lengths_N))


def informative(scored: ScoredGroups, algorithm: GroupRelative) -> Mask:
    """Return a mask of the groups in which at least one completion has an advantage other than 0, computed from rewards
    before penalties (G)."""
    if algorithm.combine == "sum_then_normalise":
        return group_statistics(scored.total_N, scored.group_N, scored.num_groups).differ
    teaches_N = np.abs(_sum_of_terms(scored, _relative(algorithm))) >= MIN_STD
    informative_G: Mask = np.bincount(scored.group_N[teaches_N], minlength=scored.num_groups) > 0
    return informative_G


def _relative(algorithm: GroupRelative) -> Relative:
    return cast(Relative, find_target(algorithm.compares_by, where=f"{algorithm.label!r}"))


def _sum_of_terms(scored: ScoredGroups, relative: Relative) -> Floats:
    sum_N = np.where(scored.is_scored, 0.0, np.nan)
    for term in scored.terms:
        rewards_N = np.where(scored.is_scored, term.standardized, np.nan)  # completions that lack a term are excluded
        sum_N += term.weight * relative(rewards_N, scored.group_N, scored.num_groups)
    return sum_N


def reinforce_pp(experience: Experience, algorithm: ReinforcePlusPlus) -> Advantages:
    """Compute, for each token, the discounted sum of rewards from the token to the end of its completion, and normalize
    these sums over all trained tokens (REINFORCE++)."""
    lengths_N = experience.scored.lengths_N
    sums_T = discounted_sums(token_rewards(experience, algorithm, algorithm.kl), lengths_N, algorithm.gamma)
    return Advantages(normalize_tokens(sums_T, lengths_N, experience.counted_N))


def reinforce_pp_baseline(experience: Experience, algorithm: ReinforcePlusPlusBaseline) -> Advantages:
    """Subtract from each completion's reward the mean of its group, assign the difference to all tokens of the
    completion, and normalize over all trained tokens (REINFORCE++ with baseline)."""
    scored = experience.scored
    centred_N = dr_grpo(scored.total_N - penalties(experience, algorithm), scored.group_N, scored.num_groups)
    centred_T = np.repeat(centred_N, scored.lengths_N)
    return Advantages(normalize_tokens(centred_T, scored.lengths_N, experience.counted_N))
