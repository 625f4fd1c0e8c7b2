"""Calls of the configured algorithm to compute advantages, and the auxiliary models that the algorithm needs.

On-policy distillation can be combined with any algorithm. It adds a term that is positive for tokens that are more
probable under the teacher than under the policy. Shapes: N completions, G groups, T completion tokens.
"""

from dataclasses import astuple, dataclass
from typing import cast

import numpy as np

from rheostat.infra.plugins import check_function, find_target
from rheostat.infra.variants import implementation_of
from rheostat.models.algorithms.capo import steps_differ
from rheostat.models.algorithms.experience import (
    AdvantageFunction,
    Advantages,
    Experience,
    InformativeFunction,
    ScoredGroups,
)
from rheostat.models.algorithms.ragged import group_statistics
from rheostat.models.algorithms.shaping import shaping_metrics
from rheostat.models.config.algorithms import Algorithm, DistillationOnly
from rheostat.models.config.teachers import Distillation
from rheostat.models.records.columns import Floats, Mask


@dataclass(frozen=True, slots=True)
class RequiredModels:
    """Auxiliary models (reference, critic, teacher) that must score every token before advantages can be computed."""

    reference: bool
    """Whether log-probs under the reference (the initial policy) are needed, for a KL penalty in the reward."""
    critic: bool
    """Whether the values that the critic predicts for every token are needed."""
    teacher: bool
    """Whether the log-probs under the teacher are needed for distillation. The trainer then also computes log-probs
    under the policy, to compare both."""

    @property
    def any(self) -> bool:
        """Whether at least one auxiliary model is needed."""
        return any(astuple(self))


def required_models(algorithm: Algorithm) -> RequiredModels:
    """Return which auxiliary models (reference, critic, teacher) must score every token before this algorithm can
    compute advantages."""
    return RequiredModels(
        reference=algorithm.reward_kl is not None,
        critic=algorithm.value_model is not None,
        teacher=algorithm.distillation is not None,
    )


def check_algorithm(algorithm: Algorithm) -> None:
    """Raise BadInput if a Python function that implements the algorithm cannot be imported or does not accept the
    required arguments."""
    for name, parameters in algorithm.functions().items():
        target = getattr(algorithm, name)
        check_function(target, *parameters, where=f"algorithm {algorithm.label!r}: {name} {target!r}")


def token_advantages(experience: Experience, algorithm: Algorithm) -> Advantages:
    """Compute the advantage of each completion token (T) with the configured algorithm, plus the distillation term if
    distillation is on and is not a term of the loss (`top_k`).

    Tokens of completions without a reward get NaN.
    """
    advantages = cast(AdvantageFunction, implementation_of(algorithm))(experience, algorithm)
    advantages_T = advantages.advantages_T
    metrics = {**advantages.metrics, **shaping_metrics(experience, algorithm, algorithm.reward_kl)}
    if algorithm.distillation is not None:
        if algorithm.distillation.top_k is None:
            advantages_T = advantages_T + distillation(experience, algorithm.distillation)
        metrics |= distillation_metrics(experience)
    return Advantages(advantages_T, advantages.returns_T, metrics)


def informative_groups(scored: ScoredGroups, algorithm: Algorithm) -> Mask:
    """Return a mask of the groups whose rewards, before any penalty is subtracted, give the algorithm a training signal
    (G)."""
    is_informative = find_target(algorithm.informative, where=f"{algorithm.label!r}")
    return cast(InformativeFunction, is_informative)(scored, algorithm)


def groups_that_differ(scored: ScoredGroups, algorithm: Algorithm, metric: str) -> Mask:
    """Return a mask of the groups whose completions have different raw scores in the reward term named `metric` (G).

    If the algorithm assigns credit to steps, groups whose steps have different values are included too.
    """
    raw_N = next(term.rewards_N for term in scored.terms if term.name == metric)
    raw_N = np.where(scored.is_scored, raw_N, np.nan)
    differ_G = group_statistics(raw_N, scored.group_N, scored.num_groups).differ
    return differ_G | steps_differ(scored) if algorithm.credits_steps else differ_G


def rewards_earn_nothing(experience: Experience, algorithm: DistillationOnly) -> Advantages:
    """Return an advantage of 0 for every token. Used if the policy is trained by distillation only, so that rewards
    have no effect."""
    return Advantages(np.zeros(len(experience.logprobs_T)))


def distillation(experience: Experience, settings: Distillation) -> Floats:
    """Return the distillation term of each token's advantage, coefficient x (log π_teacher - log π_student) (T). The
    term is exactly 0 if both log-probs are equal."""
    opinion_T: Floats = settings.coefficient * _preference(experience)
    return opinion_T


def distillation_metrics(experience: Experience) -> dict[str, float]:
    """Return the metric `teacher_kl`: an estimate of KL(student ‖ teacher) in nats per token, over the completions that
    have a reward. Empty if there are no such completions."""
    scored = experience.scored
    divergence_T = -_preference(experience)[np.repeat(scored.is_scored, scored.lengths_N)]
    return {"teacher_kl": float(divergence_T.mean())} if len(divergence_T) else {}


def _preference(experience: Experience) -> Floats:
    teacher_T, policy_T = experience.auxiliary_scores.teacher_T, experience.auxiliary_scores.policy_T
    assert teacher_T is not None, "distillation needs the teacher's log-probs"
    assert policy_T is not None, "distillation needs the policy's log-probs from the trainer"
    preference_T: Floats = teacher_T - policy_T
    return preference_T
