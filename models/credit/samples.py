"""Training samples as a table: what is kept of rollouts, with what each token is worth.

Shapes: N completions, K kept ones, T completion tokens, S segments of all completions one after the other.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infra.errors import Damaged
from models.algorithms.experience import Advantages
from models.records.columns import Floats, Integers, Mask, emptied, integers, lengths_of, lists
from models.records.model_input import completion_lengths, sample_columns
from models.records.schemas import SAMPLE_SCHEMA

PER_TOKEN = ("logprobs", "advantages", "staleness", "values", "returns")


def sample_table(
    rollouts: pa.Table,
    made: Advantages,
    values_T: Floats | None,
    *,
    kept_N: Mask,
    emptied_N: Mask,
    policy_version: int,
) -> pa.Table:
    """Build the sample table, ordered by (prompt_row, sample).

    A sample that is emptied has its prompt and no token of its completion. So it has a place in a minibatch, and
    neither a share in the loss or its penalty nor in what they are divided by.
    """
    lengths_N = completion_lengths(rollouts)
    for name, values in (("advantages", made.advantages_T), ("values", values_T), ("returns", made.returns_T)):
        rollouts = rollouts.append_column(name, _floats_column(values, lengths_N))
    rollouts = rollouts.append_column("staleness", lists(staleness(rollouts, lengths_N, policy_version), lengths_N))
    order_K = np.lexsort((integers(rollouts["sample"]), integers(rollouts["prompt_row"])))
    order_K = order_K[kept_N[order_K]]
    rows = rollouts.drop_columns(["segments", "finish_reason"]).take(pa.array(order_K)).combine_chunks()
    columns = {name: rows[name] for name in rows.column_names}
    if emptied_N[order_K].any():
        columns |= {name: emptied(rows[name], emptied_N[order_K]) for name in PER_TOKEN}
    columns |= sample_columns(rows, emptied_K=emptied_N[order_K])
    return pa.table({name: columns[name] for name in SAMPLE_SCHEMA.names}, schema=SAMPLE_SCHEMA)


def staleness(
    rollouts: pa.Table, lengths_N: Integers, policy_version: int
) -> np.ndarray[tuple[int], np.dtype[np.int16]]:
    """Return how many versions each token's writer is behind the one that learns from it."""
    segments = rollouts["segments"]
    row_S = np.repeat(np.arange(rollouts.num_rows), lengths_of(segments))
    parts = pc.list_flatten(segments)
    tokens_S, versions_S = (integers(pc.struct_field(parts, name)) for name in ("tokens", "policy_version"))
    written_N = np.bincount(row_S, weights=tokens_S, minlength=rollouts.num_rows)
    if not np.array_equal(written_N, lengths_N):
        row = int(np.flatnonzero(written_N != lengths_N)[0])
        raise Damaged(f"rollout {row}: expected segments of {lengths_N[row]} tokens in all, found {written_N[row]:.0f}")
    if len(versions_S) and versions_S.max() > policy_version:
        raise Damaged(f"rollouts: expected tokens of policies up to {policy_version}, found some of {versions_S.max()}")
    return np.repeat((policy_version - versions_S).astype(np.int16), tokens_S)


def _floats_column(values_T: Floats | None, lengths_N: Integers) -> pa.Array:
    if values_T is None:
        return pa.nulls(len(lengths_N), pa.list_(pa.float32()))
    return lists(values_T.astype(np.float32), lengths_N)
