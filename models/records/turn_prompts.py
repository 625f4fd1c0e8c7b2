"""Episodes in which every turn has a separate prompt: splitting of rollout rows into one row per model input.

In such a rollout row, the completion contains the prompt of each turn except the first, before the turn, as a segment
with the policy version `TURN_PROMPT`. Shapes: N rows, K rows after the split, S segments and T completion tokens of all
rows, one after the other.
"""

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rheostat.models.records.columns import Integers, concatenate_lists, empty_rows, flat, lengths_of, lists
from rheostat.models.records.model_input import COMPLETION_TOKENS, TURN_PROMPT, read_segments
from rheostat.models.records.schemas import PER_TOKEN

_OF_TOKENS: Final = (COMPLETION_TOKENS, *PER_TOKEN)


def count_turn_prompts(rollouts: pa.Table) -> Integers:
    """Return, for each row of a rollout table, the number of turns with a separate prompt, not counting the first turn
    (N)."""
    row_S = _rows(rollouts)
    _, versions_S = read_segments(rollouts)
    return np.bincount(row_S[versions_S == TURN_PROMPT], minlength=rollouts.num_rows).astype(np.int64)


def split_at_prompts(rollouts: pa.Table) -> tuple[pa.Table, Integers]:
    """Split rollout rows so that every turn with a separate prompt becomes a separate row. The completion of this row
    is the text of the turn.

    Returns the new rows, and for each of them the index of its original row (K). Columns with one value per completion
    token are split in the same way, and all other columns are repeated. If there is such a turn, rows without segments
    are dropped, because their completion is empty.
    """
    row_S = _rows(rollouts)
    tokens_S, versions_S = read_segments(rollouts)
    rendered_S = versions_S == TURN_PROMPT
    if not rendered_S.any():
        return rollouts, np.arange(rollouts.num_rows)
    begins_S = rendered_S | (np.diff(row_S, prepend=-1) > 0)
    row_K, part_S = row_S[begins_S], np.cumsum(begins_S) - 1
    rendered_T = np.repeat(rendered_S, tokens_S)
    prompts_K, written_K = (
        np.bincount(part_S, weights=np.where(mask_S, tokens_S, 0)).astype(np.int64)
        for mask_S in (rendered_S, ~rendered_S)
    )
    rows = rollouts.take(pa.array(row_K)).combine_chunks()
    remaining = lists(flat(rollouts[COMPLETION_TOKENS])[rendered_T], prompts_K)
    first = empty_rows(rows["prompt_tokens"], rendered_S[begins_S])
    cut = {"prompt_tokens": concatenate_lists(first, pa.chunked_array([remaining]))}
    for name in rows.column_names:
        if name in _OF_TOKENS and rows[name].null_count == 0:
            cut[name] = lists(flat(rollouts[name])[~rendered_T], written_K)
    if "segments" in rows.column_names:
        cut["segments"] = _group_lists(rollouts["segments"], ~rendered_S, part_S, len(row_K))
    for name, column in cut.items():
        rows = rows.set_column(rows.column_names.index(name), name, column)
    return rows, row_K


def _rows(rollouts: pa.Table) -> Integers:
    """Return the index of the rollout row to which each segment belongs (S). A segment is a run of completion tokens
    from the same policy version or environment."""
    return np.repeat(np.arange(rollouts.num_rows), lengths_of(rollouts["segments"]))


def _group_lists(
    segments: pa.ChunkedArray, keep_S: np.ndarray[tuple[int], np.dtype[np.bool_]], part_S: Integers, num_parts: int
) -> pa.ListArray:
    """Return a column with the segments that the mask `keep_S` selects, as one list for each new row.

    `part_S` is the index of the new row of each segment, and `num_parts` the number of new rows.
    """
    values = pc.list_flatten(segments).filter(pa.array(keep_S)).combine_chunks()
    ends_K = np.cumsum(np.bincount(part_S[keep_S], minlength=num_parts))
    return pa.ListArray.from_arrays(pa.array(np.concatenate(([0], ends_K)).astype(np.int32)), values)
