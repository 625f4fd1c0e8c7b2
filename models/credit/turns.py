"""Credit is reckoned over what a policy wrote: what an environment said between its turns is left out, and comes back.

So no algorithm knows of turns, and none of its sums, means and lengths counts a token that nobody learns. Shapes: N
completions, T completion tokens of all completions one after the other, W of these those that a policy wrote, S spans.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import pyarrow as pa

from models.algorithms.experience import Advantages, Estimates, ScoredGroups, SpanColumns
from models.records.columns import Floats, Integers, Mask
from models.records.model_input import completion_lengths, written_tokens


@dataclass(frozen=True, slots=True)
class WrittenTokens:
    """Which of the completion tokens a policy wrote."""

    written_T: Mask
    lengths_N: Integers
    """Completion tokens, those of environments included."""

    @classmethod
    def of(cls, rollouts: pa.Table) -> Self:
        """Read them from a table of rollouts."""
        return cls(written_tokens(rollouts), completion_lengths(rollouts))

    @property
    def counts_N(self) -> Integers:  # noqa: N802 -- a shape
        """Count what a policy wrote of each completion."""
        row_T = np.repeat(np.arange(len(self.lengths_N)), self.lengths_N)
        return np.bincount(row_T[self.written_T], minlength=len(self.lengths_N)).astype(np.int64)

    def taken(self, values_T: Floats) -> Floats:
        """Keep the values of tokens that a policy wrote (W)."""
        return values_T if self.written_T.all() else values_T[self.written_T]

    def of_estimates(self, estimates: Estimates) -> Estimates:
        """Keep what models say of tokens that a policy wrote."""
        columns = (estimates.policy_T, estimates.reference_T, estimates.teacher_T, estimates.values_T)
        return Estimates(*(None if column_T is None else self.taken(column_T) for column_T in columns))

    def of_groups(self, scored: ScoredGroups) -> ScoredGroups:
        """Count lengths and spans in tokens that a policy wrote; a span without any is gone, with its value."""
        if self.written_T.all():
            return scored
        terms = [term if term.spans is None else replace(term, spans=self._spans(term.spans)) for term in scored.terms]
        return replace(scored, lengths_N=self.counts_N, terms=tuple(terms))

    def spread(self, made: Advantages) -> Advantages:
        """Put advantages and returns back to their tokens; those of environments have 0 (T)."""
        returns_T = None if made.returns_T is None else self._spread(made.returns_T)
        return Advantages(self._spread(made.advantages_T), returns_T, made.metrics)

    def _spread(self, values_W: Floats) -> Floats:
        if self.written_T.all():
            return values_W
        values_T = np.zeros(len(self.written_T))
        values_T[self.written_T] = values_W
        return values_T

    def _spans(self, spans: SpanColumns) -> SpanColumns:
        before_T = np.concatenate(([0], np.cumsum(self.written_T)))  # tokens that were written before each, and at last
        begins_N = np.cumsum(self.lengths_N) - self.lengths_N
        row_S = np.repeat(np.arange(len(self.lengths_N)), spans.counts_N)
        is_last_S = np.diff(row_S, append=-1) != 0
        begins_S = before_T[begins_N[row_S] + spans.starts_S]
        ends_S = np.where(is_last_S, before_T[(begins_N + self.lengths_N)[row_S]], np.roll(begins_S, -1))
        kept_S = ends_S > begins_S
        return SpanColumns(
            starts_S=(begins_S - before_T[begins_N[row_S]])[kept_S],
            counts_N=np.bincount(row_S[kept_S], minlength=len(self.lengths_N)).astype(np.int64),
            values_S=spans.values_S[kept_S],
        )
