"""REINFORCE++-baseline (arXiv 2501.03262): the group's mean is the baseline, the batch's deviation the scale.

Shapes: N completions, T completion tokens.
"""

import numpy as np

from models.algorithms.config import ReinforcePlusPlusBaseline
from models.algorithms.dr_grpo import centred
from models.algorithms.experience import Advantages, Experience
from models.algorithms.shaping import penalties
from models.algorithms.tokens import normalised


def reinforce_pp_baseline(experience: Experience, algorithm: ReinforcePlusPlusBaseline) -> Advantages:
    """Centre rewards on their group's mean, then normalise over all tokens that are trained."""
    scored = experience.scored
    centred_N = centred(scored.total_N - penalties(experience, algorithm), scored.group_N, scored.num_groups)
    centred_T = np.repeat(centred_N, scored.lengths_N)
    return Advantages(normalised(centred_T, scored.lengths_N, experience.counted_N))
