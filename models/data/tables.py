"""Reader of the rows of Parquet and Arrow files."""

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from rheostat.infra.errors import BadInput, InputErrors
from rheostat.models.data.json_rows import FileRow, check_unique_columns
from rheostat.models.data.nested import add_fields, find_root, list_fields, list_schema_fields

ROWS: Final = 4096
"""Number of table rows that are converted to Python objects at a time, which limits memory."""


def read_table_rows(
    path: Path,
    columns: Sequence[str],
    input_errors: InputErrors,
    *,
    optional: Sequence[str] = (),
    name: str,
    version: int,
) -> Iterator[FileRow]:
    """Yield the rows of a Parquet or Arrow file with the columns in `columns`, and those in `optional` if they exist.

    Rows with values that cannot be read are added to `input_errors`. Raises BadInput if the file is invalid, lacks a
    column or has a column twice.
    """
    try:
        table = read_table(path)
    except pa.ArrowException as error:
        raise BadInput(
            f"{name}: the file is not a valid {path.suffix} file: {str(error).splitlines()[0]}. Copy or download the "
            "file again."
        ) from error
    roots = {column: find_root(table.schema, column) for column in (*columns, *optional)}
    require_columns(name, columns, [column for column, root in roots.items() if root], list_schema_fields(table.schema))
    required, columns = columns, list(dict.fromkeys(root for root in roots.values() if root is not None))
    nested = [column for column, root in roots.items() if root not in (None, column)]
    names = table.column_names if version > 1 else [column for column in table.column_names if column in columns]
    check_unique_columns(name, names)
    selected = table.select(columns)
    if version > 1:
        selected = pa.table({column: _shorten_floats(selected[column]) for column in columns})
    number = 0
    for batch in selected.to_batches(max_chunksize=ROWS):
        for place, row in _read_batch(batch, input_errors, name=name, start=number, version=version):
            with input_errors.collect(place):
                values = add_fields(row, nested)
                if nested:
                    require_columns(place, required, values, list_fields(row))
                yield place, values
        number += batch.num_rows


def peek_table(path: Path, count: int) -> tuple[list[str], list[Mapping[str, object]]]:
    """Return the names of the columns of a Parquet or Arrow file and its first `count` rows. Nested fields are named by
    dotted paths.

    Raises ArrowException if the file is invalid, and ValueError if a value cannot be read.
    """
    if path.suffix == ".parquet":
        file = pq.ParquetFile(path)
        table = pa.Table.from_batches(islice(file.iter_batches(count), 1), file.schema_arrow)
    else:
        table = _read_arrow(path).slice(0, count)
    return list_schema_fields(table.schema), table.to_pylist(maps_as_pydicts="lossy")


def _read_batch(
    batch: pa.RecordBatch, input_errors: InputErrors, *, name: str, start: int, version: int
) -> Iterator[FileRow]:
    """Yield the rows of a record batch. `start` is the number, in the file, of the first row of the batch."""
    maps = "strict" if version > 1 else None
    try:
        rows: list[Mapping[str, object]] = batch.to_pylist(maps_as_pydicts=maps)
    except (ValueError, KeyError, OverflowError):  # a text is not UTF-8, a struct has a field twice, a date is too late
        for index in range(batch.num_rows):
            place = f"{name} row {start + index}"
            with input_errors.collect(place):
                yield (
                    place,
                    {
                        column: _read_cell(f"{place}: {column}", values[index], maps)
                        for column, values in zip(batch.schema.names, batch.columns, strict=True)
                    },
                )
        return
    for index, row in enumerate(rows):
        yield f"{name} row {start + index}", row


def _read_cell(place: str, value: pa.Scalar, maps: str | None) -> object:
    """Return the value of one cell of a table. Raises BadInput, which names the row as `place`, if a text is not UTF-8
    or a key is repeated."""
    try:
        return value.as_py(maps_as_pydicts=maps)
    except UnicodeDecodeError as error:
        raise BadInput(f"{place}: expected text in UTF-8, but {error}. Write the file with text in UTF-8.") from error
    except (ValueError, KeyError, OverflowError) as error:
        raise BadInput(
            f"{place}: the value cannot be read: {error.args[0]}. Correct the value, or write the column as text."
        ) from error


def _shorten_floats(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert 32-bit floats to the 64-bit floats that are printed with the same digits. The value 0.1 then equals 0.1
    in a JSON file."""
    kind = values.type
    if pa.types.is_dictionary(kind) and pa.types.is_float32(kind.value_type):
        values = values.cast(kind.value_type)
        kind = kind.value_type
    if _replace_floats(kind, pa.float64()) == kind:
        return values
    return values.cast(_replace_floats(kind, pa.string())).cast(_replace_floats(kind, pa.float64()))


def _replace_floats(kind: pa.DataType, replacement: pa.DataType) -> pa.DataType:
    """Return a type in which all 32-bit floats, also those inside lists, maps and structs, are replaced by another
    type."""
    if pa.types.is_float32(kind):
        return replacement
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        inner = kind.value_field.with_type(_replace_floats(kind.value_type, replacement))
        if pa.types.is_fixed_size_list(kind):
            return pa.list_(inner, kind.list_size)
        return pa.list_(inner) if pa.types.is_list(kind) else pa.large_list(inner)
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, kind.item_field.with_type(_replace_floats(kind.item_type, replacement)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_replace_floats(field.type, replacement)) for field in kind])
    return kind


def read_table(path: Path) -> pa.Table:
    """Read a whole Parquet or Arrow file. Raises ArrowException if the file is invalid."""
    return pq.ParquetFile(path).read() if path.suffix == ".parquet" else _read_arrow(path)


def _read_arrow(path: Path) -> pa.Table:
    """Read an Arrow IPC file or stream. `datasets` writes streams with the suffix `.arrow`."""
    with pa.OSFile(str(path)) as file:
        if file.read(6) == b"ARROW1":
            return pa.ipc.open_file(file).read_all()
        file.seek(0)
        return pa.ipc.open_stream(file).read_all()


def require_columns(place: str, required: Sequence[str], columns: Collection[str], names: Sequence[str] = ()) -> None:
    """Raise BadInput if a required column is missing. `place` names the file or the row in messages.

    The message lists the columns in `names` (default: `columns`) and suggests the nearest one. Nested fields are named
    by dotted paths.
    """
    for column in required:
        if column not in columns:
            raise BadInput(describe_missing_column(place, column, names or [*columns]))


def describe_missing_column(place: str, column: str, names: Sequence[str]) -> str:
    """Return the message that a column is missing. `place` names the file or the row, and `names` are its columns."""
    nearest = difflib.get_close_matches(column, names, n=1)
    nearest = nearest or [each for each in names if each.rpartition(".")[2] == column.rpartition(".")[2]][:1]
    hint = f", did you mean {nearest[0]!r}?" if nearest else "."
    return f"{place}: there is no column {column!r}{hint} The columns are: {', '.join(names) or 'none'}."
