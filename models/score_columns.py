"""Score tables as the columns that algorithms read.

Shapes: N completions, G groups, S spans of all completions one after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from infra.errors import Damaged
from models.algorithms.experience import ScoredGroups, Spans, Term
from models.algorithms.groups import Integers, Mask
from models.columns import flat, floats, integers, lengths_of
from models.rewards.config import ScoringConfig, is_process


@dataclass(frozen=True, slots=True)
class TermColumns:
    """Which columns a reward term has in a score table, and its factor in the total."""

    name: str
    weight: float = 1.0
    is_process: bool = False


def term_columns(scoring: ScoringConfig) -> tuple[TermColumns, ...]:
    """Name the terms of a configuration."""
    pairs = zip(scoring.terms, scoring.rewards, strict=True)
    return tuple(TermColumns(name, reward.weight, is_process(reward)) for name, reward in pairs)


def scored_groups(
    scores: pa.Table, lengths_N: Integers, terms: Sequence[TermColumns], *, unusable_N: Mask | None = None
) -> ScoredGroups:
    """Gather what completions of the given lengths earned; those that are unusable earned nothing.

    Raises Damaged where spans of a completion that has a reward do not fit its tokens.
    """
    prompts_G, group_N = np.unique(integers(scores["prompt_row"]), return_inverse=True)
    total_N = floats(scores["reward"])
    if unusable_N is not None:
        total_N[unusable_N] = np.nan
    return ScoredGroups(
        prompts_G=prompts_G,
        group_N=group_N,
        lengths_N=lengths_N,
        total_N=total_N,
        terms=tuple(_term(scores, term, lengths_N, np.isfinite(total_N)) for term in terms),
    )


def _term(scores: pa.Table, term: TermColumns, lengths_N: Integers, scored_N: Mask) -> Term:
    spans = _spans(scores, term.name, lengths_N, scored_N) if term.is_process else None
    return Term(term.name, term.weight, floats(scores[f"reward_{term.name}"]), spans)


def _spans(scores: pa.Table, term: str, lengths_N: Integers, scored_N: Mask) -> Spans:
    starts, values = scores[f"spans_{term}"], scores[f"values_{term}"]
    counts_N, values_S = lengths_of(starts), flat(values).astype(np.float64)
    if not np.array_equal(lengths_of(values), counts_N) or not np.isfinite(values_S).all():
        raise Damaged(f"spans of {term!r}: expected one finite value per span, found others")
    spans = Spans(starts_S=flat(starts).astype(np.int64), counts_N=counts_N, values_S=values_S)
    row_S = np.repeat(np.arange(len(lengths_N)), spans.counts_N)
    first_S = np.diff(row_S, prepend=-1) > 0
    fits_S = np.where(first_S, spans.starts_S == 0, spans.starts_S > np.roll(spans.starts_S, 1))
    fits_S &= spans.starts_S < lengths_N[row_S]
    covered_N = (spans.counts_N > 0) | (lengths_N == 0) | ~scored_N
    fits_N = covered_N & (np.bincount(row_S[~fits_S], minlength=len(lengths_N)) == 0)
    _refuse(scores, ~fits_N, f"spans of {term!r}: expected ascending starts from 0 below the number of tokens")
    return spans


def _refuse(scores: pa.Table, wrong_N: Mask, expected: str) -> None:
    if wrong_N.any():
        row = int(np.flatnonzero(wrong_N)[0])
        name = f"prompt row {scores['prompt_row'][row]}, sample {scores['sample'][row]}"
        raise Damaged(f"{expected}, found others in {name}")
