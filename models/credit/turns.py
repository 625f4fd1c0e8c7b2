"""Removal of observations before the credit computation, so that credit covers only tokens that the policy generated.

The observations of an environment between the turns of an episode are removed before the computation and inserted again
afterwards. Algorithms therefore need no knowledge of turns, and their sums, means and lengths include only tokens that
are trained on.

Shapes: N completions, T completion tokens of all completions, concatenated, W tokens among these T that the policy
generated, S spans.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import pyarrow as pa

from rheostat.models.algorithms.experience import Advantages, AuxiliaryScores, ScoredGroups, SpanColumns
from rheostat.models.records.columns import Floats, Integers, Mask
from rheostat.models.records.model_input import completion_lengths, generated_tokens_mask


@dataclass(frozen=True, slots=True)
class GeneratedTokens:
    """Mask of the completion tokens that the policy generated. The other completion tokens are observations, which an
    environment inserted between the turns of an episode."""

    is_generated_T: Mask
    """Whether the policy generated each completion token. False for tokens of observations."""
    lengths_N: Integers
    """Number of completion tokens of each completion, including observations."""

    @classmethod
    def of(cls, rollouts: pa.Table) -> Self:
        """Read from the rows of a rollout table which completion tokens the policy generated."""
        return cls(generated_tokens_mask(rollouts), completion_lengths(rollouts))

    @property
    def counts_N(self) -> Integers:  # noqa: N802 -- a shape
        """Number of tokens that the policy generated in each completion (N)."""
        row_T = np.repeat(np.arange(len(self.lengths_N)), self.lengths_N)
        return np.bincount(row_T[self.is_generated_T], minlength=len(self.lengths_N)).astype(np.int64)

    def select(self, values_T: Floats) -> Floats:
        """Return the values of the tokens that the policy generated (W), given the values of all completion tokens
        (T)."""
        return values_T if self.is_generated_T.all() else values_T[self.is_generated_T]

    def select_scores(self, auxiliary_scores: AuxiliaryScores) -> AuxiliaryScores:
        """Return the auxiliary models' outputs reduced to the tokens that the policy generated (W)."""
        columns = (
            auxiliary_scores.policy_T,
            auxiliary_scores.reference_T,
            auxiliary_scores.teacher_T,
            auxiliary_scores.values_T,
        )
        return AuxiliaryScores(*(None if column_T is None else self.select(column_T) for column_T in columns))

    def select_groups(self, scored: ScoredGroups) -> ScoredGroups:
        """Return the same groups, with completion lengths and span positions counted in tokens that the policy
        generated.

        A span without such tokens is removed together with its value.
        """
        if self.is_generated_T.all():
            return scored
        terms = [term if term.spans is None else replace(term, spans=self._spans(term.spans)) for term in scored.terms]
        return replace(scored, lengths_N=self.counts_N, terms=tuple(terms))

    def expand_to_all_tokens(self, generated_advantages: Advantages) -> Advantages:
        """Return the advantages and returns of all completion tokens (T), given those of the generated tokens. Tokens
        of observations get 0."""
        returns_T = (
            None
            if generated_advantages.returns_T is None
            else self._expand_to_all_tokens(generated_advantages.returns_T)
        )
        return Advantages(
            self._expand_to_all_tokens(generated_advantages.advantages_T), returns_T, generated_advantages.metrics
        )

    def _expand_to_all_tokens(self, values_W: Floats) -> Floats:
        if self.is_generated_T.all():
            return values_W
        values_T = np.zeros(len(self.is_generated_T))
        values_T[self.is_generated_T] = values_W
        return values_T

    def _spans(self, spans: SpanColumns) -> SpanColumns:
        before_T = np.concatenate(
            ([0], np.cumsum(self.is_generated_T))
        )  # generated tokens before each token, and in all
        begins_N = np.cumsum(self.lengths_N) - self.lengths_N
        row_S = np.repeat(np.arange(len(self.lengths_N)), spans.counts_N)
        is_last_S = np.diff(row_S, append=-1) != 0
        begins_S = before_T[begins_N[row_S] + spans.starts_S]
        ends_S = np.where(is_last_S, before_T[(begins_N + self.lengths_N)[row_S]], np.roll(begins_S, -1))
        is_nonempty_S = ends_S > begins_S
        return SpanColumns(
            starts_S=(begins_S - before_T[begins_N[row_S]])[is_nonempty_S],
            counts_N=np.bincount(row_S[is_nonempty_S], minlength=len(self.lengths_N)).astype(np.int64),
            values_S=spans.values_S[is_nonempty_S],
        )
