"""REINFORCE++ (arXiv 2501.03262): token rewards summed to the end, normalised over the batch.

Shapes: T completion tokens.
"""

from models.algorithms.config import ReinforcePlusPlus
from models.algorithms.experience import Advantages, Experience
from models.algorithms.shaping import token_rewards
from models.algorithms.tokens import discounted_sums, normalised


def reinforce_pp(experience: Experience, algorithm: ReinforcePlusPlus) -> Advantages:
    """Sum up what each token is followed by, itself included, and normalise over all tokens that are trained."""
    lengths_N = experience.scored.lengths_N
    sums_T = discounted_sums(token_rewards(experience, algorithm, algorithm.kl), lengths_N, algorithm.gamma)
    return Advantages(normalised(sums_T, lengths_N, experience.counted_N))
