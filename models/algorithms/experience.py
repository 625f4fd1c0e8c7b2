"""Inputs and outputs of algorithms, as flat arrays that concatenate the values of all completions.

Shapes: N completions, G groups, T completion tokens of all completions, concatenated, S spans, concatenated likewise. A
missing reward is NaN, and so are all values computed from it.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from models.records.columns import Floats, Integers, Mask


@dataclass(frozen=True, slots=True)
class SpanColumns:
    """Values that a process reward gives to spans of tokens: to the steps or single tokens of completions."""

    starts_S: Integers
    """Index of each span's first token within its completion. A span ends where the next one begins."""
    counts_N: Integers
    """Number of spans of each completion. 0 if the reward term is missing."""
    values_S: Floats
    """Value of each span."""


@dataclass(frozen=True, slots=True)
class Term:
    """Values of one reward term."""

    name: str
    """Name of the term."""
    weight: float
    """Weight of the term in the total reward."""
    rewards_N: Floats
    """Reward of each completion. For a process reward this is the aggregate of its spans."""
    spans: SpanColumns | None = None
    """Values of steps or tokens, for a process reward. None for a reward of whole completions."""
    shift: float = 0.0
    """Value that is subtracted from each reward."""
    scale: float = 1.0
    """Value by which each shifted reward is divided."""

    @property
    def standardized(self) -> Floats:
        """Rewards after shift and scale, before weighting: (reward − shift) / scale."""
        return (self.rewards_N - self.shift) / self.scale


@dataclass(frozen=True, slots=True)
class ScoredGroups:
    """Rewards of completions, with the group of each completion."""

    prompts_G: Integers
    """Prompt row of each group, ascending."""
    group_N: Integers
    """Index of each completion's group. Groups may interleave."""
    lengths_N: Integers
    """Number of completion tokens."""
    total_N: Floats
    """Weighted sum of all terms."""
    terms: tuple[Term, ...]
    """Reward terms."""

    @property
    def num_groups(self) -> int:
        """Number of groups, including groups without any reward."""
        return len(self.prompts_G)

    @property
    def first_completions(self) -> Integers:
        """Index of each group's first completion (G)."""
        first_G: Integers = np.unique(self.group_N, return_index=True)[1]
        return first_G

    @property
    def is_scored(self) -> Mask:
        """Whether each completion has a reward (N)."""
        scored_N: Mask = np.isfinite(self.total_N)
        return scored_N

    def outcomes(self) -> Floats:
        """Return the weighted sum of the terms that score whole completions, not steps or tokens (N)."""
        outcome_N = np.where(self.is_scored, 0.0, np.nan)
        for term in self.terms:
            if term.spans is None:
                outcome_N += term.weight * term.standardized
        return outcome_N


@dataclass(frozen=True, slots=True)
class AuxiliaryScores:
    """Per-token outputs of auxiliary models, each None if it was not requested. Log-probs are in nats."""

    policy_T: Floats | None = None
    """Log-probs under the policy before the update, computed by the trainer."""
    reference_T: Floats | None = None
    """Log-probs under the initial policy."""
    teacher_T: Floats | None = None
    """Log-probs under the teacher."""
    values_T: Floats | None = None
    """Critic's prediction of the return at each token, from the tokens before it."""


@dataclass(frozen=True, slots=True)
class Experience:
    """Inputs of the advantage computation."""

    scored: ScoredGroups
    """Rewards by group."""
    logprobs_T: Floats
    """Log-probs under the policy that generated the tokens."""
    counted_N: Mask
    """Whether each completion is trained on. Normalization over the batch uses the statistics of these completions."""
    """Per-token outputs of auxiliary models."""
    auxiliary_scores: AuxiliaryScores = AuxiliaryScores()
    max_new_tokens: int = 0
    """Maximum length of completions in tokens."""
    kl_coefficient: float = 0.0
    """Coefficient of the KL penalty in the reward."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """Result of an algorithm: advantages, and returns if there is a critic."""

    advantages_T: Floats
    """Advantage of each token."""
    returns_T: Floats | None = None
    """Returns, which are the critic's training targets. None without a critic."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the advantage computation."""


class AdvantageFunction(Protocol):
    """Pure function of an algorithm that computes the advantages of an iteration."""

    def __call__(self, experience: Experience, algorithm: Any, /) -> Advantages:  # noqa: ANN401 -- the algorithm's own class
        """Return an advantage for each token, NaN for completions without a reward."""
        ...


class InformativeFunction(Protocol):
    """Pure function of an algorithm that selects the groups worth training on, from rewards before penalties."""

    def __call__(self, scored: ScoredGroups, algorithm: Any, /) -> Mask:  # noqa: ANN401 -- the algorithm's own class
        """Return whether each group is informative (G)."""
        ...
