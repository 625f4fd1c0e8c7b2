"""Estimate tables as the columns that algorithms read, and which completions have numbers that cannot be used.

Shapes: N completions, T completion tokens of all completions one after the other.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from infra.errors import BadInput, Damaged
from models.algorithms.config import AlgorithmConfig
from models.algorithms.experience import Estimates
from models.algorithms.groups import Floats, Integers, Mask
from models.algorithms.needs import needs_of
from models.columns import Numbers, flat, lengths_of


def read_estimates(tables: Sequence[pa.Table], lengths_N: Integers) -> Estimates:
    """Read what models say of tokens; a column without any number was not asked for."""
    if not tables:
        return Estimates()
    table = pa.concat_tables(tables).combine_chunks()
    return Estimates(
        policy_T=_column(table, "policy", lengths_N),
        reference_T=_column(table, "reference", lengths_N),
        teacher_T=_column(table, "teacher", lengths_N),
        values_T=_column(table, "values", lengths_N),
    )


def check_needed(estimates: Estimates, algorithm: AlgorithmConfig) -> None:
    """Raise BadInput if the algorithm needs an estimate that nobody made."""
    needs = needs_of(algorithm)
    needed = {
        "policy": (needs.teacher, estimates.policy_T),
        "reference": (needs.reference, estimates.reference_T),
        "teacher": (needs.teacher, estimates.teacher_T),
        "values": (needs.critic, estimates.values_T),
    }
    if lacking := [name for name, (is_needed, found_T) in needed.items() if is_needed and found_T is None]:
        found = ", ".join(name for name, (_, found_T) in needed.items() if found_T is not None) or "none"
        raise BadInput(f"algorithm {algorithm.kind!r}: expected estimates of {', '.join(lacking)}, found {found}")


def not_finite(column: pa.ChunkedArray, lengths_N: Integers) -> Mask:
    """Find completions with log-probs that would poison the update."""
    if not np.array_equal(lengths_of(column), lengths_N):
        raise Damaged("rollouts: expected one log-prob per completion token, found other lengths")
    return _with_wrong_numbers(flat(column), lengths_N)


def unusable(estimates: Estimates, lengths_N: Integers) -> Mask:
    """Find completions of which a model says what is no number."""
    bad_N = np.zeros(len(lengths_N), np.bool_)
    for values_T in (estimates.policy_T, estimates.reference_T, estimates.teacher_T, estimates.values_T):
        if values_T is not None:
            bad_N |= _with_wrong_numbers(values_T, lengths_N)
    return bad_N


def _column(table: pa.Table, name: str, lengths_N: Integers) -> Floats | None:
    column = table[name]
    if len(column) and column.null_count == len(column):
        return None
    if not np.array_equal(lengths_of(column), lengths_N):
        raise Damaged(f"estimates: expected one number of {name!r} per completion token, found other lengths")
    return flat(column).astype(np.float64)


def _with_wrong_numbers(values_T: Numbers | Floats, lengths_N: Integers) -> Mask:
    wrong = np.flatnonzero(~np.isfinite(values_T))
    bad_N = np.zeros(len(lengths_N), np.bool_)
    bad_N[np.searchsorted(np.cumsum(lengths_N), wrong, side="right")] = True
    return bad_N
