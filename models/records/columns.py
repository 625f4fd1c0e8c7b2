"""Conversion between Arrow list columns and flat NumPy arrays.

Shapes: K rows, T values of all rows, one after the other.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Number = TypeVar("Number", bound=np.generic)

Floats = NDArray[np.float64]

Integers = NDArray[np.int64]

Mask = NDArray[np.bool_]

Numbers = NDArray[np.float32] | NDArray[np.float64] | NDArray[np.int16] | NDArray[np.int32]


def select_rows(table: pa.Table, rows: Sequence[int] | None) -> pa.Table:
    """Return the rows of a table whose `prompt_row` is in `rows`, or the whole table if `rows` is None."""
    return table if rows is None else table.filter(pc.is_in(table["prompt_row"], pa.array(rows, pa.int32())))


def concatenate_tables(tables: Sequence[pa.Table]) -> pa.Table:
    """Concatenate tables and drop their schema metadata. If a table lacks a column that another table has, the column
    is null in its rows."""
    return pa.concat_tables([each.replace_schema_metadata(None) for each in tables], promote_options="default")


def floats(column: pa.ChunkedArray) -> Floats:
    """Return the K values of a numeric column as a float64 array, with NaN for null."""
    return np.array(column.to_numpy(), dtype=np.float64)


def integers(column: pa.ChunkedArray) -> Integers:
    """Return the K values of an integer column as an int64 array. The column must not contain nulls."""
    return np.array(column.to_numpy(), dtype=np.int64)


def lengths_of(column: pa.ChunkedArray) -> Integers:
    """Return the length of the list in each of the K rows, with 0 for null."""
    return integers(pc.fill_null(pc.list_value_length(column), 0))


def flat(column: pa.ChunkedArray) -> Numbers:
    """Return the concatenated values of all rows' lists (T)."""
    values: Numbers = pc.list_flatten(column).to_numpy()
    return values


def row_arrays(column: pa.ChunkedArray, dtype: type[Number]) -> list[NDArray[Number]]:
    """Return the list of each row as an array that shares memory with the column. The lists must have the element type
    `dtype`, and no list may be null."""
    rows: list[NDArray[Number]] = []
    for array in column.chunks:
        values: NDArray[Number] = array.values.to_numpy()
        assert values.dtype == dtype, f"expected {dtype.__name__}, found {values.dtype}"
        rows += [values[begin:end] for begin, end in pairwise(array.offsets.to_pylist())]
    return rows


def large_lists(values_T: Numbers, lengths_K: Integers) -> pa.LargeListArray:
    """Split a flat array into a list column that can have more than 2**31 values. See `lists`."""
    offsets = np.concatenate(([0], np.cumsum(lengths_K)))
    return pa.LargeListArray.from_arrays(pa.array(offsets.astype(np.int64)), pa.array(values_T))


def lists(values_T: Numbers, lengths_K: Integers) -> pa.ListArray:
    """Split a flat array into a list column. `lengths_K` is the length of each row's list. This is the inverse of
    `flat`."""
    offsets = np.concatenate(([0], np.cumsum(lengths_K)))
    assert offsets[-1] < 2**31, f"{offsets[-1]} tokens are too many for the lists of one shard"
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values_T))


def empty_rows(column: pa.ChunkedArray, emptied_K: Mask) -> pa.ChunkedArray:
    """Return a copy of a list column in which the rows marked by `emptied_K` have empty lists. A column that contains
    only nulls is returned unchanged."""
    if column.null_count == len(column):
        return column
    lengths_K = lengths_of(column)
    keep_T = np.repeat(~emptied_K, lengths_K)
    split = large_lists if pa.types.is_large_list(column.type) else lists
    return pa.chunked_array([split(flat(column)[keep_T], np.where(emptied_K, 0, lengths_K))])


def concatenate_lists(left: pa.ChunkedArray, right: pa.ChunkedArray) -> pa.ListArray:
    """Concatenate two columns of integer lists row by row, so that row i contains the left list followed by the right
    list."""
    lefts_K, rights_K = lengths_of(left), lengths_of(right)
    starts_K = np.cumsum(lefts_K + rights_K) - lefts_K - rights_K
    joined_T = np.empty(lefts_K.sum() + rights_K.sum(), np.int32)
    for values, lengths_K, begins_K in ((left, lefts_K, starts_K), (right, rights_K, starts_K + lefts_K)):
        shifts_T = np.repeat(begins_K - (np.cumsum(lengths_K) - lengths_K), lengths_K)
        joined_T[np.arange(len(shifts_T)) + shifts_T] = flat(values)
    return lists(joined_T, lefts_K + rights_K)
