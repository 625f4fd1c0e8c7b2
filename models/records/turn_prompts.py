"""Episodes in which every turn has a prompt of its own: how their rows in rollouts are cut into what models read.

Such a row has in its completion, before each turn but the first, the prompt that the turn was written after, as a
segment of the version `RENDERED`. Shapes: N rows, K rows after the cut, S segments and T completion tokens of all rows
one after the other.
"""

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from models.records.columns import Integers, concatenated, emptied, flat, lengths_of, lists
from models.records.model_input import COMPLETION_TOKENS, RENDERED, segments_of
from models.records.schemas import PER_TOKEN

_OF_TOKENS: Final = (COMPLETION_TOKENS, *PER_TOKEN)


def turn_prompts(rollouts: pa.Table) -> Integers:
    """Count the turns of each row that have a prompt of their own, beside the row's first (N)."""
    row_S = _rows(rollouts)
    _, versions_S = segments_of(rollouts)
    return np.bincount(row_S[versions_S == RENDERED], minlength=rollouts.num_rows).astype(np.int64)


def cut_at_prompts(rollouts: pa.Table) -> tuple[pa.Table, Integers]:
    """Have every turn that has a prompt of its own begin a row, whose completion is what was written after it.

    Returns the rows, and the index of the one that each was cut from (K). Columns of completion tokens are cut alike;
    all others are repeated. A row without a segment is left out: nothing was written in it.
    """
    row_S = _rows(rollouts)
    tokens_S, versions_S = segments_of(rollouts)
    rendered_S = versions_S == RENDERED
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
    own = lists(flat(rollouts[COMPLETION_TOKENS])[rendered_T], prompts_K)
    first = emptied(rows["prompt_tokens"], rendered_S[begins_S])
    cut = {"prompt_tokens": concatenated(first, pa.chunked_array([own]))}
    for name in rows.column_names:
        if name in _OF_TOKENS and rows[name].null_count == 0:
            cut[name] = lists(flat(rollouts[name])[~rendered_T], written_K)
    if "segments" in rows.column_names:
        cut["segments"] = _lists_of(rollouts["segments"], ~rendered_S, part_S, len(row_K))
    for name, column in cut.items():
        rows = rows.set_column(rows.column_names.index(name), name, column)
    return rows, row_K


def _rows(rollouts: pa.Table) -> Integers:
    """Row of each segment (S)."""
    return np.repeat(np.arange(rollouts.num_rows), lengths_of(rollouts["segments"]))


def _lists_of(
    segments: pa.ChunkedArray, kept_S: np.ndarray[tuple[int], np.dtype[np.bool_]], part_S: Integers, num_parts: int
) -> pa.ListArray:
    """Keep some segments, in a list for each part."""
    kept = pc.list_flatten(segments).filter(pa.array(kept_S)).combine_chunks()
    ends_K = np.cumsum(np.bincount(part_S[kept_S], minlength=num_parts))
    return pa.ListArray.from_arrays(pa.array(np.concatenate(([0], ends_K)).astype(np.int32)), kept)
