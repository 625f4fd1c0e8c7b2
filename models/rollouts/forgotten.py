"""Removal of users' data from the rows of a run's tables. Counts and the structure of the tables stay valid.

Texts become empty. Numbers per token become zero, because log-probs and values would reveal the tokens to anyone who
has the model.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rheostat.models.judges.votes import CANARY
from rheostat.models.records.columns import Mask, lengths_of
from rheostat.models.records.model_input import zero_experts
from rheostat.models.records.schemas import EXPERTS

_TEXTS_KEPT: Final = ("prompt_id", "finish_reason", "run", "role")
_NUMBERS_KEPT: Final = ("staleness", "steps")
_SPANS: Final = "spans_"
FORGOTTEN: Final = "forgotten"
"""Text that replaces an error message, because the message may quote a completion. The number of errors stays the
same."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts whose data is removed from a run, with the IDs and row numbers by which tables refer to them."""

    ids: frozenset[str]
    rows: frozenset[int]
    others: frozenset[str] = frozenset()
    """Digests of the images that prompts outside this selection use. These images are kept."""


def find_prompts(table: pa.Table, ids: Collection[str]) -> Prompts:
    """Find the prompts with the given prompt IDs in a table of prompts."""
    names: list[str] = table["prompt_id"].to_pylist()
    rows = frozenset(row for row, name in enumerate(names) if name in ids)
    others = {image for row, images in enumerate(table["images"].to_pylist()) if row not in rows for image in images}
    return Prompts(frozenset(names[row] for row in rows), rows, frozenset(others))


def erase_prompts(table: pa.Table, prompts: Prompts) -> tuple[pa.Table, int]:
    """Empty the rows about the given prompts in a table of a run, and drop the images that no other prompt uses.
    Returns the table and the number of rows that contained any data to remove."""
    if "bytes" in table.column_names and "prompt_row" in table.column_names:  # generated pictures
        remaining = table.filter(pa.array(~_find_rows_of(table, prompts)))
        return remaining, table.num_rows - remaining.num_rows
    if "bytes" in table.column_names:
        remaining = table.filter(_find_rows_with(table["digest"], prompts.others, pa.string()))
        return remaining, table.num_rows - remaining.num_rows
    is_gone = _find_rows_of(table, prompts)
    emptied = table
    for place, field in enumerate(table.schema):
        if is_gone.any() and (column := _empty_lists(table[field.name], field, is_gone)) is not None:
            emptied = emptied.set_column(place, field, column)
    changed = not emptied.equals(table)
    return (emptied, int(is_gone.sum())) if changed else (table, 0)


def _find_rows_of(table: pa.Table, prompts: Prompts) -> Mask:
    """Return a mask of the table rows that contain data about the prompts. If there are any, verdicts on canaries
    (known-bad answers that test a judge) are included, because they may quote a prompt."""
    if "prompt_id" in table.column_names:
        return _find_rows_with(table["prompt_id"], prompts.ids, pa.string())
    is_gone = _find_rows_with(table["prompt_row"], prompts.rows, pa.int32())
    return is_gone | _find_rows_with(table["prompt_row"], [CANARY], pa.int32()) if is_gone.any() else is_gone


def _find_rows_with(column: pa.ChunkedArray, values: Collection[object], kind: pa.DataType) -> Mask:
    """Return a mask of the entries of a column that are equal to one of `values`. `kind` is the Arrow type of the
    column."""
    is_listed: Mask = pc.is_in(column, pa.array(list(values), kind)).to_numpy()
    return is_listed


def _empty_lists(column: pa.ChunkedArray, field: pa.Field, is_gone: Mask) -> pa.ChunkedArray | None:
    """Return a column with the users' data in the rows of the mask `is_gone` removed. Return None if a column of this
    type or name contains no users' data. Nulls stay null."""
    if pa.types.is_string(field.type) and field.name not in _TEXTS_KEPT:
        had = pc.and_(pa.array(is_gone), pc.is_valid(column))
        return pc.if_else(had, pa.scalar(FORGOTTEN if field.name == "error" else ""), column)
    if pa.types.is_list(field.type) and pa.types.is_string(field.type.value_type):  # digests of images
        return pc.if_else(pa.array(is_gone), pa.scalar([], field.type), column)
    if field.name == "images":
        rows = zip(column.to_pylist(), is_gone, strict=True)
        return pa.chunked_array([[[] if gone else images for images, gone in rows]], field.type)
    if pa.types.is_list(field.type) and pa.types.is_struct(field.type.value_type):
        return _without_texts(column, field.type, is_gone)
    if field.name == EXPERTS:
        return zero_experts(column, is_gone)
    is_kept = field.name in _NUMBERS_KEPT or field.name.startswith(_SPANS)
    if pa.types.is_list(field.type) and not is_kept:
        return _zero_values(column, field.type, is_gone)
    return None


def _without_texts(column: pa.ChunkedArray, kind: pa.ListType, is_gone: Mask) -> pa.ChunkedArray | None:
    """Return a column of records, such as messages or turns, with the texts in the rows of the mask `is_gone` removed.
    Return None if the records contain no texts to remove."""
    texts = [part.name for part in kind.value_type if pa.types.is_string(part.type) and part.name not in _TEXTS_KEPT]
    if not texts:
        return None
    emptied = {name: FORGOTTEN if name == "error" else "" for name in texts}

    def without_texts(record: dict[str, object]) -> dict[str, object]:
        return record | {name: text for name, text in emptied.items() if record[name] is not None}

    rows = [
        [without_texts(record) for record in records] if gone and records is not None else records
        for records, gone in zip(column.to_pylist(), is_gone, strict=True)
    ]
    return pa.chunked_array([rows], kind)


def _zero_values(column: pa.ChunkedArray, kind: pa.ListType, is_gone: Mask) -> pa.ChunkedArray:
    """Return a list column with all numbers in the rows of the mask `is_gone` set to zero. List lengths and nulls stay
    the same."""
    lengths_K = lengths_of(column)
    values_T = pc.if_else(
        pa.array(np.repeat(is_gone, lengths_K)), pa.scalar(0, kind.value_type), pc.list_flatten(column)
    )
    flat_T = values_T.combine_chunks() if isinstance(values_T, pa.ChunkedArray) else values_T
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths_K))).astype(np.int32))
    nulls = pa.array(pc.is_null(column).to_numpy())
    return pa.chunked_array([pa.ListArray.from_arrays(offsets, flat_T, type=kind, mask=nulls)])
