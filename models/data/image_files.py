"""The image files that rows of a data file name, found without a pixel and without images that lie in the rows.

Whoever reads the problems says what is wrong with a row; what is no file below the root is left out here.
"""

import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from infra.errors import BadInput, Complaints
from infra.store.inputs import fetched
from models.config.data import ProblemFile
from models.data.files import format_of, text_rows

PATH, BYTES = "path", "bytes"
"""Fields of the structs that `datasets` writes."""
ROWS = 4096
"""Of a table that are looked at together."""


def image_files(data: ProblemFile) -> Iterator[Path]:
    """Name the files, each once, in order of their first use."""
    if data.images_column is None:
        return
    known: set[Path] = set()
    for path in filter(None, (data.path, data.heldout_path)):
        root = data.images_root or path.parent
        with suppress(OSError, EOFError, ValueError, BadInput, zlib.error, pa.ArrowException):
            for name in _names(fetched(path), data.images_column):
                found = root / name
                if found not in known and not name.startswith("data:") and "://" not in name:
                    known.add(found)
                    yield found


def _names(path: Path, column: str) -> Iterator[str]:
    """Read what a column says of paths; of images in the rows nothing is read."""
    match format_of(path):
        case ".jsonl" | ".json" | ".csv":
            for _, row in text_rows(path, Complaints(), name=str(path)):
                yield from _spelt(row.get(column))
        case ".parquet":
            file = pq.ParquetFile(path)
            leaves = [file.schema.column(index) for index in range(len(file.schema))]
            wanted = [leaf.path for leaf in leaves if _may_name(leaf, column)]
            for batch in file.iter_batches(ROWS, columns=wanted) if wanted else ():
                yield from _texts(batch.column(0))
        case ".arrow":
            with pa.memory_map(str(path)) as mapped:
                for batch in _batches(mapped):
                    if column in batch.schema.names:
                        yield from _texts(batch.column(column))


def _spelt(value: object) -> Iterator[str]:
    for each in value if isinstance(value, list) else [value]:
        match each:
            case {"bytes": str() | None, "path": str(name)} | {"path": str(name)} | str(name):
                yield name


def _may_name(leaf: pq.ColumnSchema, column: str) -> bool:
    """Whether a leaf of a Parquet file is the column's text, or the path in its structs."""
    parts = leaf.path.split(".")
    return parts[0] == column and parts[-1] != BYTES and bool(leaf.logical_type.type == "STRING")


def _batches(mapped: pa.MemoryMappedFile) -> Iterator[pa.RecordBatch]:
    """Map an Arrow IPC file, or a stream, which is what `datasets` writes under the same suffix."""
    is_file = mapped.read(6) == b"ARROW1"
    mapped.seek(0)
    if not is_file:
        yield from pa.ipc.open_stream(mapped)
        return
    opened = pa.ipc.open_file(mapped)
    yield from map(opened.get_batch, range(opened.num_record_batches))


def _texts(column: pa.Array) -> Iterator[str]:
    while pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        column = column.flatten()
    if pa.types.is_struct(column.type):
        column = column.field(PATH) if column.type.get_field_index(PATH) >= 0 else pa.nulls(0, pa.string())
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        yield from (name for name in column.to_pylist() if name is not None)
