"""Inputs and outputs of algorithms, as flat arrays that concatenate the values of all completions.

Shapes: N completions, G groups, T completion tokens of all completions, concatenated, S spans, concatenated likewise. A
missing reward is NaN, and so are all values computed from it.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rheostat.models.records.columns import Floats, Integers, Mask


@dataclass(frozen=True, slots=True)
class SpanColumns:
    """Values of one process reward, which scores spans of tokens (the steps, tokens or turns of completions)."""

    starts_S: Integers
    """Index of each span's first token within its completion. A span ends where the next span of the completion
    begins."""
    counts_N: Integers
    """Number of spans of each completion. It is 0 if the process reward has no values for the completion."""
    values_S: Floats
    """Reward of each span, in the order of the spans of all completions."""


@dataclass(frozen=True, slots=True)
class Term:
    """Values of one reward term (one of the weighted rewards that are summed) for all completions."""

    name: str
    """Name of the reward term."""
    weight: float
    """Weight by which the term is multiplied in the total reward."""
    rewards_N: Floats
    """Reward of each completion. For a process reward, the values of the completion's spans combined into one
    number."""
    spans: SpanColumns | None = None
    """Values of the steps, tokens or turns if this term is a process reward. None if the term scores whole
    completions."""
    shift: float = 0.0
    """Number subtracted from each reward of the term, before division by `scale`."""
    scale: float = 1.0
    """Number by which each reward of the term is divided after `shift` was subtracted."""

    @property
    def standardized(self) -> Floats:
        """Reward of each completion after shift and scale and before weighting: (reward − shift) / scale."""
        return (self.rewards_N - self.shift) / self.scale


@dataclass(frozen=True, slots=True)
class ScoredGroups:
    """Rewards of all completions, with the group (all completions of one prompt) to which each completion belongs."""

    prompts_G: Integers
    """Row number of each group's prompt in the list of prompts, ascending."""
    group_N: Integers
    """Index of the group of each completion. Completions of different groups may be interleaved."""
    lengths_N: Integers
    """Number of completion tokens of each completion."""
    total_N: Floats
    """Total reward of each completion, which is the weighted sum of all reward terms. NaN if the completion has no
    reward."""
    terms: tuple[Term, ...]
    """Values of each reward term, before multiplication by the term's weight."""

    @property
    def num_groups(self) -> int:
        """Number of groups, including groups in which no completion has a reward."""
        return len(self.prompts_G)

    @property
    def first_completions(self) -> Integers:
        """Index of the first completion of each group (G)."""
        first_G: Integers = np.unique(self.group_N, return_index=True)[1]
        return first_G

    @property
    def is_scored(self) -> Mask:
        """Mask of the completions that have a total reward (N)."""
        scored_N: Mask = np.isfinite(self.total_N)
        return scored_N

    def outcomes(self) -> Floats:
        """Return each completion's weighted sum of the reward terms that score whole completions (N). Process rewards,
        which score steps, tokens or turns, are excluded."""
        outcome_N = np.where(self.is_scored, 0.0, np.nan)
        for term in self.terms:
            if term.spans is None:
                outcome_N += term.weight * term.standardized
        return outcome_N


@dataclass(frozen=True, slots=True)
class AuxiliaryScores:
    """Outputs of auxiliary models (reference, critic, teacher) for every token. An output that the algorithm does not
    need is None. Log-probs are in nats."""

    policy_T: Floats | None = None
    """Log-prob of each token under the policy before the update, computed by the trainer."""
    reference_T: Floats | None = None
    """Log-prob of each token under the reference, which is the initial policy."""
    teacher_T: Floats | None = None
    """Log-prob of each token under the teacher, for distillation."""
    values_T: Floats | None = None
    """Expected return that the critic predicts at each token, given the tokens before it."""


@dataclass(frozen=True, slots=True)
class Experience:
    """Inputs from which an algorithm computes the advantages of one iteration."""

    scored: ScoredGroups
    """Rewards of the completions, with the group of each completion."""
    logprobs_T: Floats
    """Log-prob of each token under the policy that generated the token, in nats."""
    counted_N: Mask
    """Mask of the completions that are trained on with a weight in the loss. Statistics for normalizing over the batch
    cover only these completions."""
    """Per-token outputs of auxiliary models."""
    auxiliary_scores: AuxiliaryScores = AuxiliaryScores()
    max_new_tokens: int = 0
    """Maximum length of completions in tokens, from which the length penalty is computed."""
    kl_coefficient: float = 0.0
    """Coefficient of the KL penalty in the reward, in the current iteration."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """Output of an algorithm: the advantages of all tokens, and the returns if there is a critic."""

    advantages_T: Floats
    """Advantage of each completion token."""
    returns_T: Floats | None = None
    """Return (sum of future rewards) of each token, on which the critic is trained. None without a critic."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Additional metrics that the algorithm reports, by name."""


class AdvantageFunction(Protocol):
    """Pure function that implements one algorithm: it computes the advantages of an iteration. `token_advantages` calls
    the function of the configured algorithm."""

    def __call__(self, experience: Experience, algorithm: Any, /) -> Advantages:  # noqa: ANN401 -- the algorithm's own class
        """Return the advantage of each token, or NaN for tokens of completions without a reward. `algorithm` contains
        the settings of the algorithm."""
        ...


class InformativeFunction(Protocol):
    """Pure function that decides for one algorithm which groups give a training signal, from rewards before penalties.
    `informative_groups` calls the function of the configured algorithm."""

    def __call__(self, scored: ScoredGroups, algorithm: Any, /) -> Mask:  # noqa: ANN401 -- the algorithm's own class
        """Return a mask of the groups from which the algorithm can learn (G). `algorithm` contains the settings of the
        algorithm."""
        ...
