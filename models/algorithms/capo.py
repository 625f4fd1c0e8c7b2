"""Token-level credit from outcome rewards and steps flagged as wrong (CAPO, arXiv 2508.02298).

Shapes: N completions, G groups, T completion tokens.
"""

import numpy as np

from rheostat.models.algorithms.experience import Advantages, Experience, ScoredGroups
from rheostat.models.algorithms.ragged import MIN_STD, group_statistics, values_on_tokens
from rheostat.models.algorithms.shaping import penalties
from rheostat.models.config.algorithms import Capo
from rheostat.models.records.columns import Floats, Mask


def capo(experience: Experience, algorithm: Capo) -> Advantages:
    """Compute a reward for each token, and normalize these rewards over all completion tokens of the group.

    The reward of a token is the reward of its completion plus the weighted value of its step, which is -1 if the step
    was flagged as wrong. The mean and standard deviation weight all tokens equally, so long completions influence them
    more. If all tokens of a group have the same reward, their advantages are 0.
    """
    scored = experience.scored
    outcome_N = scored.outcomes() - penalties(experience, algorithm)
    rewards_T = _token_rewards(scored, outcome_N)
    group_T = np.repeat(scored.group_N, scored.lengths_N)
    groups = group_statistics(rewards_T, group_T, scored.num_groups)
    scale_G = np.where(groups.std_G < MIN_STD, np.inf, groups.std_G)
    rewards_T -= groups.mean_G[group_T]
    rewards_T /= scale_G[group_T]
    return Advantages(rewards_T)


def informative(scored: ScoredGroups, algorithm: Capo) -> Mask:
    """Return a mask of the groups in which not all tokens have the same reward, before penalties (G)."""
    return _tokens_differ(scored, _token_rewards(scored, scored.outcomes()))


def steps_differ(scored: ScoredGroups) -> Mask:
    """Return a mask of the groups whose tokens have different values in at least one process reward (a reward of steps,
    tokens or turns) (G)."""
    differ_G = np.zeros(scored.num_groups, np.bool_)
    missing_N = np.where(scored.is_scored, 0.0, np.nan)
    for term in scored.terms:
        if term.spans is not None:
            values_T = values_on_tokens(term.spans, scored.lengths_N)
            differ_G |= _tokens_differ(scored, values_T + np.repeat(missing_N, scored.lengths_N))
    return differ_G


def _token_rewards(scored: ScoredGroups, outcome_N: Floats) -> Floats:
    rewards_T: Floats = np.repeat(outcome_N, scored.lengths_N)
    for term in scored.terms:
        if term.spans is not None:
            rewards_T += term.weight * values_on_tokens(term.spans, scored.lengths_N)
    return rewards_T


def _tokens_differ(scored: ScoredGroups, values_T: Floats) -> Mask:
    group_T = np.repeat(scored.group_N, scored.lengths_N)
    return group_statistics(values_T, group_T, scored.num_groups).differ
