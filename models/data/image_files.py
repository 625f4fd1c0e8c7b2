"""Names of the image files to which the rows of a data file refer.

They are found without decoding images and without reading images embedded in the rows. Invalid rows, and paths outside
the root, are skipped, because reading the problems reports them.
"""

import zlib
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pyarrow.parquet as pq

from rheostat.infra.errors import BadInput, InputErrors
from rheostat.infra.store.hub import fetch_files, resolve_commit
from rheostat.infra.store.hub_names import HubAddress, parse_hub_address
from rheostat.infra.store.inputs import format_path, is_on_hub, split_into_files
from rheostat.models.config.data import ProblemFile
from rheostat.models.config.training import ChatTraining
from rheostat.models.data.nested import find_field, find_root, has_field
from rheostat.models.data.rows import find_data_files, find_format, text_rows

PATH, BYTES = "path", "bytes"
"""Names of the fields with the path and the encoded bytes in the structs in which Hugging Face `datasets` stores an
image."""
ROWS = 4096
"""Number of table rows that are read at a time, which limits memory."""


def image_files(data: ProblemFile | ChatTraining) -> Iterator[Path]:
    """Yield the path of each image file that the rows of a data file name. Each path is yielded once, in the order of
    first use."""
    if data.images_column is None:
        return
    seen_paths: set[Path] = set()
    for path in filter(None, (data.path, data.heldout_path)):
        with suppress(OSError, EOFError, ValueError, BadInput, zlib.error, pa.ArrowException):
            found, root = find_data_files(path), find_image_root(path, data)
            for name in chain.from_iterable(_iterate_paths(here, data.images_column) for here, _ in found.files):
                image_path = root / name
                if image_path not in seen_paths and name[:5].lower() != "data:" and "://" not in name:
                    seen_paths.add(image_path)
                    yield image_path


def find_image_root(path: Path, data: ProblemFile | ChatTraining) -> Path:
    """Return the directory to which image paths in the rows of a data file or folder are relative. Image files on the
    Hugging Face Hub are downloaded if the rows name them.

    The directory is `images_root`, the data folder, or the folder of the data file. For a dataset on the Hub, this is
    the folder of the first data file of the split.
    """
    root = data.images_root
    if root is None:
        first = split_into_files(path)[0]
        root = path if first == path and find_data_files(path).is_folder else first.parent
    if data.images_column is not None and is_on_hub(root):
        _fetch_images(path, data.images_column, parse_hub_address(format_path(root)))
    return root


def _fetch_images(path: Path, column: str, root: HubAddress) -> None:
    """Download the image files that the rows of a data file name, together. `root` is the address of their directory on
    the Hub. Invalid names are skipped, because reading the rows reports them."""
    names = set[str]()
    with suppress(OSError, EOFError, ValueError, BadInput, zlib.error, pa.ArrowException):
        files = [here for here, _ in find_data_files(path).files]
        names.update(chain.from_iterable(_iterate_paths(here, column) for here in files))
    found = [PurePosixPath(root.file, name) for name in sorted(names) if "://" not in name and name[:5] != "data:"]
    within = [str(each) for each in found if ".." not in each.parts and not each.is_absolute()]
    if within:
        fetch_files(root.pin(resolve_commit(root)), within)


def _iterate_paths(path: Path, column: str) -> Iterator[str]:
    """Yield the image paths in a column of a data file. Images whose bytes are stored in a table are not loaded."""
    match find_format(path):
        case ".jsonl" | ".json" | ".csv" | ".tsv":
            for _, row in text_rows(path, InputErrors(), name=str(path)):
                if has_field(row, column):
                    yield from _paths_in_value(find_field(row, column))
        case ".parquet":
            file = pq.ParquetFile(path)
            leaves = [file.schema.column(index) for index in range(len(file.schema))]
            leaf_paths = [leaf.path for leaf in leaves if _may_name(leaf, column)]
            for batch in file.iter_batches(ROWS, columns=leaf_paths) if leaf_paths else ():
                yield from _iterate_texts(_find_array(batch, column))
        case ".arrow" | ".feather":
            with pa.memory_map(str(path)) as mapped:
                for batch in _iterate_batches(mapped):
                    yield from _iterate_texts(_find_array(batch, column))


def _paths_in_value(value: object) -> Iterator[str]:
    """Yield the image paths in one value of the image column, which is an image, a list of images, or None."""
    for each in value if isinstance(value, list) else [value]:
        match each:
            case {"bytes": str() | None, "path": str(name)} | {"path": str(name)} | str(name):
                yield name


def _may_name(leaf: pq.ColumnSchema, column: str) -> bool:
    """Return whether a leaf column of a Parquet file contains image paths: the texts of `column`, or the path field of
    its structs."""
    last = leaf.path.rpartition(".")[2]
    return f"{leaf.path}.".startswith(f"{column}.") and last != BYTES and bool(leaf.logical_type.type == "STRING")


def _iterate_batches(mapped: pa.MemoryMappedFile) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of a memory-mapped Arrow IPC file or stream. `datasets` writes streams."""
    is_file = mapped.read(6) == b"ARROW1"
    mapped.seek(0)
    if not is_file:
        yield from pa.ipc.open_stream(mapped)
        return
    opened = pa.ipc.open_file(mapped)
    yield from map(opened.get_batch, range(opened.num_record_batches))


def _find_array(batch: pa.RecordBatch, path: str) -> pa.Array:
    """Return a column of a batch, or the nested field that the dotted `path` names. Return an empty array if there is
    none."""
    if path in batch.schema.names:
        return batch.column(path)
    root = find_root(batch.schema, path)
    if root is None or not pa.types.is_struct(batch.schema.field(root).type):
        return pa.nulls(0, pa.string())
    array = batch.column(root)
    inner = pa.RecordBatch.from_arrays(array.flatten(), schema=pa.schema([*array.type]))
    return _find_array(inner, path[len(root) + 1 :])


def _iterate_texts(column: pa.Array) -> Iterator[str]:
    """Yield the image paths in an Arrow column of strings, of structs with a path, or of lists of either."""
    while pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        column = column.flatten()
    if pa.types.is_struct(column.type):
        column = column.field(PATH) if column.type.get_field_index(PATH) >= 0 else pa.nulls(0, pa.string())
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        yield from (name for name in column.to_pylist() if name is not None)
