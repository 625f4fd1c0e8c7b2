"""On-policy distillation: the teacher's opinion of what the policy wrote (reverse KL per token, with its sign turned).

Shapes: T completion tokens.
"""

from models.algorithms.config import Distillation
from models.algorithms.experience import Experience
from models.algorithms.groups import Floats


def distillation(experience: Experience, settings: Distillation) -> Floats:
    """Return coefficient x (log π_teacher - log π_student) of each token: exactly 0 where the two agree."""
    teacher_T, policy_T = experience.estimates.teacher_T, experience.estimates.policy_T
    assert teacher_T is not None, "distillation needs the teacher's log-probs"
    assert policy_T is not None, "distillation needs the policy's log-probs by the trainer"
    opinion_T: Floats = settings.coefficient * (teacher_T - policy_T)
    return opinion_T
