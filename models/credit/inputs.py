"""Conversion of score tables and of auxiliary models' outputs to the arrays that algorithms use.

Shapes: N completions, G groups, S spans and T completion tokens of all completions, concatenated.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rheostat.infra.errors import BadInput, Damaged
from rheostat.models.algorithms.advantages import required_models
from rheostat.models.algorithms.experience import AuxiliaryScores, ScoredGroups, SpanColumns, Term
from rheostat.models.config.algorithms import AlgorithmConfig
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.records.columns import Floats, Integers, Mask, Numbers, flat, floats, integers, lengths_of


@dataclass(frozen=True, slots=True)
class TermColumns:
    """Reward term as the credit computation needs it: the name, which determines its columns in score tables, and the
    factors of its rewards."""

    name: str
    """Name of the reward term."""
    weight: float = 1.0
    """Weight by which the term is multiplied in the total reward."""
    is_process: bool = False
    """Whether the term is a process reward, which scores steps, tokens or turns instead of whole completions."""
    shift: float = 0.0
    """Number subtracted from each reward of the term, before division by `scale`."""
    scale: float = 1.0
    """Number by which each reward of the term is divided after `shift` was subtracted."""


def term_columns(scoring: ScoringConfig) -> tuple[TermColumns, ...]:
    """Return the column names and factors of all reward terms in a scoring configuration."""
    pairs = zip(scoring.terms, scoring.rewards, strict=True)
    return tuple(
        TermColumns(name, reward.weight, reward.scores_parts, reward.shift, reward.scale) for name, reward in pairs
    )


def scored_groups(
    scores: pa.Table, lengths_N: Integers, terms: Sequence[TermColumns], *, unusable_N: Mask | None = None
) -> ScoredGroups:
    """Read the rewards of completions from a score table, and return them with the group of each completion.

    `lengths_N` is the number of completion tokens of each completion. Completions in the mask `unusable_N` are treated
    as if they had no reward. Raises Damaged if the spans of a completion (its scored steps, tokens or turns) do not
    match its tokens.
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
    return Term(term.name, term.weight, floats(scores[f"reward_{term.name}"]), spans, term.shift, term.scale)


def _spans(scores: pa.Table, term: str, lengths_N: Integers, scored_N: Mask) -> SpanColumns:
    starts, values = scores[f"spans_{term}"], scores[f"values_{term}"]
    counts_N, values_S = lengths_of(starts), flat(values).astype(np.float64)
    if not np.array_equal(lengths_of(values), counts_N) or not np.isfinite(values_S).all():
        raise Damaged(
            f"scores of reward {term!r}: every scored span of a completion must have exactly one finite value, but "
            "some values are missing, NaN or infinite. Restore the score shard from a copy of the run."
        )
    spans = SpanColumns(starts_S=flat(starts).astype(np.int64), counts_N=counts_N, values_S=values_S)
    row_S = np.repeat(np.arange(len(lengths_N)), spans.counts_N)
    first_S = np.diff(row_S, prepend=-1) > 0
    fits_S = np.where(first_S, spans.starts_S == 0, spans.starts_S > np.roll(spans.starts_S, 1))
    fits_S &= spans.starts_S < lengths_N[row_S]
    covered_N = (spans.counts_N > 0) | (lengths_N == 0) | ~scored_N
    fits_N = covered_N & (np.bincount(row_S[~fits_S], minlength=len(lengths_N)) == 0)
    _refuse(
        scores,
        ~fits_N,
        f"scores of reward {term!r}: the start positions of the spans of a completion must begin with 0, ascend, and "
        "be less than its number of tokens",
    )
    return spans


def _refuse(scores: pa.Table, wrong_N: Mask, expected: str) -> None:
    if wrong_N.any():
        row = int(np.flatnonzero(wrong_N)[0])
        name = f"prompt row {scores['prompt_row'][row]}, sample {scores['sample'][row]}"
        raise Damaged(f"{expected}. This is not the case for {name}. Restore the score shard from a copy of the run.")


def read_auxiliary_scores(tables: Sequence[pa.Table], lengths_N: Integers) -> AuxiliaryScores:
    """Return the per-token outputs of the auxiliary models (reference, critic, teacher). Outputs without a column are
    None.

    Raises Damaged if the number of outputs of a completion differs from its number of tokens.
    """
    if not tables:
        return AuxiliaryScores()
    table = pa.concat_tables(tables).combine_chunks()
    return AuxiliaryScores(
        policy_T=_column(table, "policy", lengths_N),
        reference_T=_column(table, "reference", lengths_N),
        teacher_T=_column(table, "teacher", lengths_N),
        values_T=_column(table, "values", lengths_N),
    )


def check_required_outputs(auxiliary_scores: AuxiliaryScores, algorithm: AlgorithmConfig) -> None:
    """Raise BadInput if an auxiliary model's output that the algorithm needs is missing."""
    needs = required_models(algorithm)
    needed = {
        "policy": (needs.teacher, auxiliary_scores.policy_T),
        "reference": (needs.reference, auxiliary_scores.reference_T),
        "teacher": (needs.teacher, auxiliary_scores.teacher_T),
        "values": (needs.critic, auxiliary_scores.values_T),
    }
    if lacking := [name for name, (is_needed, values_T) in needed.items() if is_needed and values_T is None]:
        available = ", ".join(name for name, (_, values_T) in needed.items() if values_T is not None) or "none"
        raise BadInput(
            f"algorithm.kind = {algorithm.label!r} needs the per-token outputs {', '.join(lacking)} of auxiliary "
            f"models, but the stored shards contain only: {available}. Use an algorithm that does not need them, or "
            "train a new run with this algorithm."
        )


def has_nonfinite_logprobs(column: pa.ChunkedArray, lengths_N: Integers) -> Mask:
    """Return a mask of the completions with at least one log-prob that is NaN or infinite (N). Training on them would
    make the weights NaN.

    Raises Damaged if the number of log-probs of a completion differs from its number of tokens.
    """
    if not np.array_equal(lengths_of(column), lengths_N):
        raise Damaged(
            "the rollout shards must have one log-prob for each token of a completion, but the numbers differ for at "
            "least one completion. Restore the shards from a copy of the run."
        )
    return _with_wrong_numbers(flat(column), lengths_N)


def has_nonfinite_scores(auxiliary_scores: AuxiliaryScores, lengths_N: Integers) -> Mask:
    """Return a mask of the completions for which at least one output of an auxiliary model is NaN or infinite (N)."""
    bad_N = np.zeros(len(lengths_N), np.bool_)
    for values_T in (
        auxiliary_scores.policy_T,
        auxiliary_scores.reference_T,
        auxiliary_scores.teacher_T,
        auxiliary_scores.values_T,
    ):
        if values_T is not None:
            bad_N |= _with_wrong_numbers(values_T, lengths_N)
    return bad_N


def _column(table: pa.Table, name: str, lengths_N: Integers) -> Floats | None:
    column = table[name]
    if len(column) and column.null_count == len(column):
        return None
    if not np.array_equal(lengths_of(column), lengths_N):
        raise Damaged(
            f"the per-token outputs {name!r} of auxiliary models must have one number for each token of a completion, "
            "but the numbers differ for at least one completion. Restore the shards from a copy of the run."
        )
    return flat(column).astype(np.float64)


def _with_wrong_numbers(values_T: Numbers | Floats, lengths_N: Integers) -> Mask:
    wrong = np.flatnonzero(~np.isfinite(values_T))
    bad_N = np.zeros(len(lengths_N), np.bool_)
    bad_N[np.searchsorted(np.cumsum(lengths_N), wrong, side="right")] = True
    return bad_N
