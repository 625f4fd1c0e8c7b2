"""From what completions earned to what each token is worth, and what that asks of models beside rewards.

Shapes: N completions, G groups, T completion tokens.
"""

from dataclasses import astuple, dataclass
from typing import cast

import numpy as np

from infra.plugins import check_function, find_target
from infra.variants import implementation_of
from models.algorithms.capo import steps_differ
from models.algorithms.distillation import distillation, distillation_metrics
from models.algorithms.experience import (
    AdvantageFunction,
    Advantages,
    Experience,
    InformativeFunction,
    ScoredGroups,
)
from models.algorithms.ragged import group_statistics
from models.algorithms.shaping import shaping_metrics
from models.config.algorithms import Algorithm
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
        reference=algorithm.reward_kl is not None,
        critic=algorithm.value_model is not None,
        teacher=algorithm.distillation is not None,
    )


def check_algorithm(algorithm: Algorithm) -> None:
    """Raise BadInput unless the algorithm's functions can be imported and called."""
    for name, parameters in algorithm.functions().items():
        target = getattr(algorithm, name)
        check_function(target, *parameters, where=f"algorithm {algorithm.known_as!r}: {name} {target!r}")


def token_advantages(experience: Experience, algorithm: Algorithm) -> Advantages:
    """Give each token of each completion that has a reward its advantage, the teacher's opinion included."""
    made = cast(AdvantageFunction, implementation_of(algorithm))(experience, algorithm)
    advantages_T = made.advantages_T
    metrics = {**made.metrics, **shaping_metrics(experience, algorithm, algorithm.reward_kl)}
    if algorithm.distillation is not None:
        advantages_T = advantages_T + distillation(experience, algorithm.distillation)
        metrics |= distillation_metrics(experience)
    return Advantages(advantages_T, made.returns_T, metrics)


def informative_groups(scored: ScoredGroups, algorithm: Algorithm) -> Mask:
    """Find the groups that rewards alone, before anything is taken from them, make worth training (G)."""
    found = find_target(algorithm.informative, where=f"{algorithm.known_as!r}")
    return cast(InformativeFunction, found)(scored, algorithm)


def groups_that_differ(scored: ScoredGroups, algorithm: Algorithm, metric: str) -> Mask:
    """Find the groups in which a raw term differs (G); where steps get credit of their own, theirs may differ too."""
    raw_N = next(term.rewards_N for term in scored.terms if term.name == metric)
    raw_N = np.where(scored.is_scored, raw_N, np.nan)
    differ_G = group_statistics(raw_N, scored.group_N, scored.num_groups).differ
    return differ_G | steps_differ(scored) if algorithm.credits_steps else differ_G
