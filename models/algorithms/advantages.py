"""From what completions earned to what each token is worth, and what that asks of models beside rewards.

Shapes: N completions, G groups, T completion tokens.
"""

from dataclasses import astuple, dataclass

import numpy as np

from models.algorithms import capo as capo_credit
from models.algorithms import group_relative
from models.algorithms.distillation import distillation, distillation_metrics
from models.algorithms.experience import Advantages, Experience, ScoredGroups
from models.algorithms.ppo import ppo
from models.algorithms.ragged import group_statistics
from models.algorithms.reinforce import reinforce_pp, reinforce_pp_baseline
from models.algorithms.shaping import shaping_metrics
from models.config.algorithms import (
    Algorithm,
    AlgorithmConfig,
    Capo,
    DistillationOnly,
    DrGrpo,
    GroupRelative,
    Grpo,
    Ppo,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    RewardKl,
    Rloo,
)
from models.records.columns import Mask


@dataclass(frozen=True, slots=True)
class Needs:
    """Whose opinion of every token credit needs."""

    reference: bool
    """The initial policy's, for a penalty in the reward."""
    critic: bool
    teacher: bool
    """The teacher's, and beside it the policy's own by the trainer."""

    @property
    def any(self) -> bool:
        """Whether there is anything to ask."""
        return any(astuple(self))


def required_models(algorithm: Algorithm) -> Needs:
    """Whose opinion of every token the algorithm needs."""
    return Needs(
        reference=reward_kl(algorithm) is not None,
        critic=isinstance(algorithm, Ppo),
        teacher=algorithm.distillation is not None,
    )


def reward_kl(algorithm: Algorithm) -> RewardKl | None:
    """The penalty in the reward, of algorithms that have one."""
    return algorithm.kl if isinstance(algorithm, GroupRelative | ReinforcePlusPlus | Ppo) else None


def token_advantages(experience: Experience, algorithm: AlgorithmConfig) -> Advantages:
    """Give each token of each completion that has a reward its advantage, the teacher's opinion included."""
    made = _of_rewards(experience, algorithm)
    advantages_T = made.advantages_T
    metrics = {**made.metrics, **shaping_metrics(experience, algorithm, reward_kl(algorithm))}
    if algorithm.distillation is not None:
        advantages_T = advantages_T + distillation(experience, algorithm.distillation)
        metrics |= distillation_metrics(experience)
    return Advantages(advantages_T, made.returns_T, metrics)


def informative_groups(scored: ScoredGroups, algorithm: AlgorithmConfig) -> Mask:
    """Find the groups that rewards alone, before anything is taken from them, make worth training (G)."""
    match algorithm:
        case Grpo() | DrGrpo() | Rloo():
            return group_relative.informative(scored, algorithm)
        case Capo():
            return capo_credit.informative(scored)
        case _:
            return group_statistics(scored.total_N, scored.group_N, scored.num_groups).differ


def groups_that_differ(scored: ScoredGroups, algorithm: AlgorithmConfig, metric: str) -> Mask:
    """Find the groups in which a raw term differs (G); where steps get credit of their own, theirs may differ too."""
    raw_N = next(term.rewards_N for term in scored.terms if term.name == metric)
    raw_N = np.where(scored.is_scored, raw_N, np.nan)
    differ_G = group_statistics(raw_N, scored.group_N, scored.num_groups).differ
    return differ_G | capo_credit.steps_differ(scored) if isinstance(algorithm, Capo) else differ_G


def keeps_uninformative(algorithm: AlgorithmConfig) -> bool:
    """Whether groups of equal rewards are trained too: their tokens may be worth something by other means."""
    match algorithm:
        case ReinforcePlusPlus() | Ppo() | DistillationOnly():
            return True
        case Capo():
            return algorithm.distillation is not None
        case _:
            return algorithm.distillation is not None or algorithm.keep_uninformative


def _of_rewards(experience: Experience, algorithm: AlgorithmConfig) -> Advantages:
    match algorithm:
        case Grpo() | DrGrpo() | Rloo():
            return group_relative.group_relative(experience, algorithm)
        case ReinforcePlusPlus():
            return reinforce_pp(experience, algorithm)
        case ReinforcePlusPlusBaseline():
            return reinforce_pp_baseline(experience, algorithm)
        case Ppo():
            return ppo(experience, algorithm)
        case Capo():
            return capo_credit.capo(experience, algorithm)
        case DistillationOnly():
            return Advantages(np.zeros(len(experience.logprobs_T)))
