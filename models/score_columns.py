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
    spans = Spans(
        starts_S=flat(starts).astype(np.int64), counts_N=lengths_of(starts), values_S=flat(values).astype(np.float64)
    )
    for what, wrong_N in (
        ("as many values as spans", lengths_of(values) != spans.counts_N),
        ("spans for every token", (spans.counts_N == 0) & (lengths_N > 0) & scored_N),
    ):
        _refuse(scores, wrong_N, f"spans of {term!r}: expected {what}")
    row_S = np.repeat(np.arange(len(lengths_N)), spans.counts_N)
    before_S = np.where(np.diff(row_S, prepend=-1) > 0, 0, np.roll(spans.starts_S, 1))
    first_S = np.diff(row_S, prepend=-1) > 0
    wrong_S = (spans.starts_S < before_S) | (spans.starts_S > lengths_N[row_S]) | (first_S & (spans.starts_S != 0))
    wrong_S |= ~np.isfinite(spans.values_S) & scored_N[row_S]
    wrong_N = np.bincount(row_S[wrong_S], minlength=len(lengths_N)) > 0
    _refuse(scores, wrong_N, f"spans of {term!r}: expected finite values and starts from 0 up to the number of tokens")
    return spans


def _refuse(scores: pa.Table, wrong_N: Mask, expected: str) -> None:
    if wrong_N.any():
        row = int(np.flatnonzero(wrong_N)[0])
        name = f"prompt row {scores['prompt_row'][row]}, sample {scores['sample'][row]}"
        raise Damaged(f"{expected}, found others in {name}")
