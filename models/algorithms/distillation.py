"""On-policy distillation: the teacher's opinion of what the policy wrote (reverse KL per token, with its sign turned).

Shapes: T completion tokens.
"""

import numpy as np

from models.algorithms.experience import Advantages, Experience
from models.config.algorithms import DistillationOnly
from models.config.teachers import Distillation
from models.records.columns import Floats


def rewards_earn_nothing(experience: Experience, algorithm: DistillationOnly) -> Advantages:
    """Leave all to the teacher."""
    return Advantages(np.zeros(len(experience.logprobs_T)))


def distillation(experience: Experience, settings: Distillation) -> Floats:
    """Return coefficient x (log π_teacher - log π_student) of each token: exactly 0 where the two agree."""
    opinion_T: Floats = settings.coefficient * _preference(experience)
    return opinion_T


def distillation_metrics(experience: Experience) -> dict[str, float]:
    """Estimate KL(student ‖ teacher) in nats per token, over the completions that have a reward."""
    scored = experience.scored
    divergence_T = -_preference(experience)[np.repeat(scored.is_scored, scored.lengths_N)]
    return {"teacher_kl": float(divergence_T.mean())} if len(divergence_T) else {}


def _preference(experience: Experience) -> Floats:
    teacher_T, policy_T = experience.estimates.teacher_T, experience.estimates.policy_T
    assert teacher_T is not None, "distillation needs the teacher's log-probs"
    assert policy_T is not None, "distillation needs the policy's log-probs by the trainer"
    preference_T: Floats = teacher_T - policy_T
    return preference_T
