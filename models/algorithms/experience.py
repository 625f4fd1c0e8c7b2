"""What algorithms read and write: flat ragged columns.

Shapes: N completions, G groups, T completion tokens of all completions one after the other, S spans likewise.
A missing reward is NaN, and so is all that follows from it.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from models.records.columns import Floats, Integers, Mask


@dataclass(frozen=True, slots=True)
class SpanColumns:
    """Values of the steps or tokens of completions."""

    starts_S: Integers
    """First token of each span, counted from the first of its completion; a span ends where the next one begins."""
    counts_N: Integers
    """Spans of each completion; 0 where the term is missing."""
    values_S: Floats


@dataclass(frozen=True, slots=True)
class Term:
    """One reward term."""

    name: str
    weight: float
    rewards_N: Floats
    """One number per completion; of a process term the aggregate of its spans."""
    spans: SpanColumns | None = None
    """What a process term says of steps or tokens."""
    shift: float = 0.0
    scale: float = 1.0

    @property
    def standardised(self) -> Floats:
        """The numbers that are weighed."""
        return (self.rewards_N - self.shift) / self.scale


@dataclass(frozen=True, slots=True)
class ScoredGroups:
    """Completions in groups, and what they earned."""

    prompts_G: Integers
    """Prompt row of each group, ascending."""
    group_N: Integers
    """Index of each completion's group; groups may interleave."""
    lengths_N: Integers
    """Completion tokens."""
    total_N: Floats
    """Weighted sum of all terms."""
    terms: tuple[Term, ...]

    @property
    def num_groups(self) -> int:
        """Count groups, those without any reward too."""
        return len(self.prompts_G)

    @property
    def first_completions(self) -> Integers:
        """Index of each group's first completion."""
        first_G: Integers = np.unique(self.group_N, return_index=True)[1]
        return first_G

    @property
    def is_scored(self) -> Mask:
        """Whether a completion has a reward."""
        scored_N: Mask = np.isfinite(self.total_N)
        return scored_N

    def outcomes(self) -> Floats:
        """Weighted sum of the terms that value whole completions, where others value their tokens one by one."""
        outcome_N = np.where(self.is_scored, 0.0, np.nan)
        for term in self.terms:
            if term.spans is None:
                outcome_N += term.weight * term.standardised
        return outcome_N


@dataclass(frozen=True, slots=True)
class Estimates:
    """What models say of each token; none where nobody asked. Log-probs in nats."""

    policy_T: Floats | None = None
    """Under the policy before the update, by the trainer."""
    reference_T: Floats | None = None
    """Under the initial policy."""
    teacher_T: Floats | None = None
    values_T: Floats | None = None
    """The critic's, of the state that the token was drawn in."""


@dataclass(frozen=True, slots=True)
class Experience:
    """All that advantages are made from."""

    scored: ScoredGroups
    logprobs_T: Floats
    """Behaviour log-probs."""
    counted_N: Mask
    """Completions over which a batch is normalised: those that are trained."""
    estimates: Estimates = Estimates()
    max_new_tokens: int = 0
    """Length limit of completions."""
    kl_coefficient: float = 0.0
    """Of the penalty in the reward."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """What each token is worth."""

    advantages_T: Floats
    returns_T: Floats | None = None
    """What the critic learns; none without a critic."""
    metrics: dict[str, float] = field(default_factory=dict)


class AdvantageFunction(Protocol):
    """What each token of an iteration is worth, by rewards: a pure function."""

    def __call__(self, experience: Experience, algorithm: Any, /) -> Advantages:  # noqa: ANN401 -- the algorithm's own class
        """Return an advantage per token, NaN where the completion has no reward."""
        ...


class InformativeFunction(Protocol):
    """Which groups are worth training, by rewards alone, before anything is taken from them: a pure function."""

    def __call__(self, scored: ScoredGroups, algorithm: Any, /) -> Mask:  # noqa: ANN401 -- the algorithm's own class
        """Return a truth value per group."""
        ...
