"""Arrow columns as flat arrays, and back.

Shapes: K rows, T values of all rows one after the other.
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


def counted(table: pa.Table, rows: Sequence[int] | None) -> pa.Table:
    """Keep the completions of the prompt rows that count; none are all."""
    return table if rows is None else table.filter(pc.is_in(table["prompt_row"], pa.array(rows, pa.int32())))


def concatenated_tables(tables: Sequence[pa.Table]) -> pa.Table:
    """Put tables one after the other, without what each says of itself; a column that one lacks is null there."""
    return pa.concat_tables([each.replace_schema_metadata(None) for each in tables], promote_options="default")


def floats(column: pa.ChunkedArray) -> Floats:
    """Copy a column of numbers; null becomes NaN."""
    return np.array(column.to_numpy(), dtype=np.float64)


def integers(column: pa.ChunkedArray) -> Integers:
    """Copy a column of integers, of which none is null."""
    return np.array(column.to_numpy(), dtype=np.int64)


def lengths_of(column: pa.ChunkedArray) -> Integers:
    """Return the length of each row's list; null has none."""
    return integers(pc.fill_null(pc.list_value_length(column), 0))


def flat(column: pa.ChunkedArray) -> Numbers:
    """Join the lists of all rows."""
    values: Numbers = pc.list_flatten(column).to_numpy()
    return values


def row_arrays(column: pa.ChunkedArray, dtype: type[Number]) -> list[NDArray[Number]]:
    """Cut a column into the lists of its rows, without a copy of their values; no list is null."""
    found: list[NDArray[Number]] = []
    for array in column.chunks:
        values: NDArray[Number] = array.values.to_numpy()
        assert values.dtype == dtype, f"expected {dtype.__name__}, found {values.dtype}"
        found += [values[begin:end] for begin, end in pairwise(array.offsets.to_pylist())]
    return found


def lists(values_T: Numbers, lengths_K: Integers) -> pa.ListArray:
    """Cut values into lists, one per row."""
    offsets = np.concatenate(([0], np.cumsum(lengths_K)))
    assert offsets[-1] < 2**31, f"{offsets[-1]} tokens are more than one shard's lists can address"
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values_T))


def emptied(column: pa.ChunkedArray, emptied_K: Mask) -> pa.ChunkedArray:
    """Make the lists of some rows empty; a column that is null stays so."""
    if column.null_count == len(column):
        return column
    lengths_K = lengths_of(column)
    kept_T = np.repeat(~emptied_K, lengths_K)
    return pa.chunked_array([lists(flat(column)[kept_T], np.where(emptied_K, 0, lengths_K))])


def concatenated(left: pa.ChunkedArray, right: pa.ChunkedArray) -> pa.ListArray:
    """Concatenate two columns of integer lists row by row."""
    lefts_K, rights_K = lengths_of(left), lengths_of(right)
    starts_K = np.cumsum(lefts_K + rights_K) - lefts_K - rights_K
    joined_T = np.empty(lefts_K.sum() + rights_K.sum(), np.int32)
    for values, lengths_K, begins_K in ((left, lefts_K, starts_K), (right, rights_K, starts_K + lefts_K)):
        shifts_T = np.repeat(begins_K - (np.cumsum(lengths_K) - lengths_K), lengths_K)
        joined_T[np.arange(len(shifts_T)) + shifts_T] = flat(values)
    return lists(joined_T, lefts_K + rights_K)
