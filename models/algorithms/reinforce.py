"""REINFORCE++ and its baseline variant (arXiv 2501.03262).

Shapes: N completions, T completion tokens.
"""

import numpy as np

from models.algorithms.experience import Advantages, Experience
from models.algorithms.group_relative import dr_grpo
from models.algorithms.ragged import discounted_sums, normalised
from models.algorithms.shaping import penalties, token_rewards
from models.config.algorithms import ReinforcePlusPlus, ReinforcePlusPlusBaseline


def reinforce_pp(experience: Experience, algorithm: ReinforcePlusPlus) -> Advantages:
    """Sum up what each token is followed by, itself included, and normalise over all tokens that are trained."""
    lengths_N = experience.scored.lengths_N
    sums_T = discounted_sums(token_rewards(experience, algorithm, algorithm.kl), lengths_N, algorithm.gamma)
    return Advantages(normalised(sums_T, lengths_N, experience.counted_N))


def reinforce_pp_baseline(experience: Experience, algorithm: ReinforcePlusPlusBaseline) -> Advantages:
    """Centre rewards on their group's mean, then normalise over all tokens that are trained."""
    scored = experience.scored
    centred_N = dr_grpo(scored.total_N - penalties(experience, algorithm), scored.group_N, scored.num_groups)
    centred_T = np.repeat(centred_N, scored.lengths_N)
    return Advantages(normalised(centred_T, scored.lengths_N, experience.counted_N))
