"""Selection and order of the tokens for the credit computation, so that credit covers only tokens that the policy
generated.

The observations of an environment between the turns of an episode are removed before the computation and inserted again
afterwards. Algorithms therefore need no knowledge of turns, and their sums, means and lengths include only tokens that
are trained on. The turns of an agent's episode are stored branch after branch. For the computation they are in order of
time, because a turn can only have an effect on rewards after it.

Shapes: N completions, T completion tokens of all completions, concatenated, W tokens among these T that the policy
generated, S spans, F spans of generated tokens, U turns.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rheostat.models.algorithms.experience import Advantages, AuxiliaryScores, ScoredGroups, SpanColumns
from rheostat.models.records.columns import Floats, Integers, integers, lengths_of
from rheostat.models.records.model_input import completion_lengths, generated_tokens_mask


@dataclass(frozen=True, slots=True)
class GeneratedTokens:
    """Positions of the completion tokens that the policy generated. The other completion tokens are observations, which
    an environment inserted between the turns of an episode, and prompts of turns."""

    places_W: Integers
    """Index among all completion tokens (T) of each token that the policy generated, completion after completion. The
    tokens of a completion are in order of time."""
    lengths_N: Integers
    """Number of completion tokens of each completion, including observations."""

    @classmethod
    def of(cls, rollouts: pa.Table) -> Self:
        """Read from the rows of a rollout table which completion tokens the policy generated."""
        lengths_N = completion_lengths(rollouts)
        places_W = np.flatnonzero(generated_tokens_mask(rollouts)).astype(np.int64)
        if (time_T := _times_of_tokens(rollouts, lengths_N)) is not None:
            row_T = np.repeat(np.arange(len(lengths_N)), lengths_N)
            places_W = places_W[np.lexsort((time_T[places_W], row_T[places_W]))]
        return cls(places_W, lengths_N)

    @property
    def counts_N(self) -> Integers:  # noqa: N802 -- a shape
        """Number of tokens that the policy generated in each completion (N)."""
        row_T = np.repeat(np.arange(len(self.lengths_N)), self.lengths_N)
        return np.bincount(row_T[self.places_W], minlength=len(self.lengths_N)).astype(np.int64)

    def select(self, values_T: Floats) -> Floats:
        """Return the values of the tokens that the policy generated (W), given the values of all completion tokens
        (T)."""
        return values_T if self._is_identity else values_T[self.places_W]

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
        if self._is_identity:
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
        if self._is_identity:
            return values_W
        values_T = np.zeros(self.lengths_N.sum())
        values_T[self.places_W] = values_W
        return values_T

    @property
    def _is_identity(self) -> bool:
        """Whether the policy generated all completion tokens, in the order in which they are stored."""
        return np.array_equal(self.places_W, np.arange(self.lengths_N.sum()))

    def _spans(self, spans: SpanColumns) -> SpanColumns:
        """Return the spans of the tokens that the policy generated. A span whose tokens are not consecutive in order of
        time becomes several spans with the same value."""
        begins_N, counts_N = np.cumsum(self.lengths_N) - self.lengths_N, self.counts_N
        row_S = np.repeat(np.arange(len(self.lengths_N)), spans.counts_N)
        begins_S = begins_N[row_S] + spans.starts_S
        is_last_S = np.diff(row_S, append=-1) != 0
        ends_S = np.where(is_last_S, (begins_N + self.lengths_N)[row_S], np.roll(begins_S, -1))
        span_T = np.full(self.lengths_N.sum(), -1)
        span_T[np.repeat(spans.counts_N > 0, self.lengths_N)] = np.repeat(np.arange(len(row_S)), ends_S - begins_S)
        span_W = span_T[self.places_W]
        first_F = np.flatnonzero((np.diff(span_W, prepend=-1) != 0) & (span_W >= 0)).astype(np.int64)
        row_W = np.repeat(np.arange(len(counts_N)), counts_N)
        return SpanColumns(
            starts_S=first_F - (np.cumsum(counts_N) - counts_N)[row_W[first_F]],
            counts_N=np.bincount(row_W[first_F], minlength=len(counts_N)).astype(np.int64),
            values_S=spans.values_S[span_W[first_F]],
        )


def _times_of_tokens(rollouts: pa.Table, lengths_N: Integers) -> Integers | None:
    """Return the order of the turn of each completion token (T), or None if the table contains no episodes of agents.

    The order is 0 for completions that are not an agent's, and for unfinished ones.
    """
    turns = pc.list_flatten(rollouts["turns"]) if "turns" in rollouts.column_names else pa.nulls(0)
    if not len(turns) or (order := pc.struct_field(turns, "order")).null_count == len(turns):
        return None
    row_U = np.repeat(np.arange(rollouts.num_rows), lengths_of(rollouts["turns"]))
    tokens_U, observation_U = (integers(pc.struct_field(turns, name)) for name in ("tokens", "observation"))
    sizes_U, order_U = tokens_U + observation_U, integers(pc.fill_null(order, 0))
    is_whole_N = np.bincount(row_U, weights=sizes_U, minlength=len(lengths_N)) == lengths_N
    time_T = np.zeros(lengths_N.sum(), np.int64)
    kept_U = is_whole_N[row_U]
    time_T[np.repeat(is_whole_N, lengths_N)] = np.repeat(order_U[kept_U], sizes_U[kept_U])
    return time_T
