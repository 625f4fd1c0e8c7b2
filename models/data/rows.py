"""Rows of JSON, CSV, TSV, Parquet and Arrow files, each with its place in the file for messages."""

import csv
import gzip
import io
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import IO, Final, Protocol, TypeVar, cast

import pyarrow as pa

from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput, InputErrors
from rheostat.infra.store.inputs import fetch_path, format_path, is_on_hub, split_into_files
from rheostat.infra.user_files import (
    DATA_SUFFIXES,
    FETCH_LFS,
    PACKED_SUFFIXES,
    TEXT_SUFFIXES,
    describe_irregular,
    is_lfs_pointer,
)
from rheostat.models.data.dropping import EmptyRow
from rheostat.models.data.folders import list_data_files
from rheostat.models.data.json_rows import FileRow, check_unique_columns, decode_text, read_json_array, read_json_lines
from rheostat.models.data.nested import add_fields, list_fields
from rheostat.models.data.tables import peek_table, read_table_rows, require_columns

T = TypeVar("T", str, bytes, covariant=True)


class LineReader(Protocol[T]):
    """File that is read line by line: a buffered binary file or a text file."""

    def readline(self, size: int, /) -> T:
        """Return the next line, or its first `size` bytes or characters if it is longer. Empty at the end of the
        file."""
        ...


DELIMITERS: Final = {".csv": ",", ".tsv": "\t"}
"""Character that separates columns, by the suffix of the file."""
MAX_LINE_MEBIBYTES: Final = 256
"""Maximum length of a line in MiB, after decompression."""
MAX_ARRAY_MEBIBYTES: Final = 2048
"""Maximum size of a JSON array in MiB, after decompression. An array is loaded into memory as a whole."""
MISSING_IN_CSV: Final = frozenset(("nan", "NaN", "-nan", "-NaN", "<NA>", "NaT", "#N/A", "inf", "-inf"))
"""Texts that data frames and spreadsheets write to CSV and TSV files for missing values and infinite numbers."""
READ_BYTES: Final = 2**20
"""Number of bytes of a file that are read at a time, which limits memory."""


def read_rows(
    path: Path,
    columns: Sequence[str],
    input_errors: InputErrors,
    *,
    optional: Sequence[str] = (),
    version: int = 1,
) -> Iterator[FileRow]:
    """Yield the rows of a file, or of all files of a folder, in order. Each row must have the columns in `columns`, and
    may have those in `optional`. A dotted path names a nested field.

    `version` is the version of the rules for reading (`ProblemFile.version`). Version 2 refuses repeated keys and
    columns, and converts 32-bit floats and maps of tables to the values that JSON files would have. Invalid rows are
    added to `input_errors`. Raises BadInput if the file cannot be read.
    """
    found = find_data_files(path)
    for here, name in found.files:
        yield from _read_file(here, columns, input_errors, optional=optional, name=name, version=version)


def _read_file(
    here: Path, columns: Sequence[str], input_errors: InputErrors, *, optional: Sequence[str], name: str, version: int
) -> Iterator[FileRow]:
    """Yield the rows of one local file, as `read_rows` does. `name` names the file in messages."""
    try:
        if is_lfs_pointer(here):
            raise BadInput(f"{name} {FETCH_LFS}.")
        if find_format(here) not in TEXT_SUFFIXES:
            yield from read_table_rows(here, columns, input_errors, optional=optional, name=name, version=version)
            return
        is_csv = version > 1 and find_format(here) in DELIMITERS
        for place, row in text_rows(here, input_errors, name=name, version=version):
            with input_errors.collect(place):
                values = add_fields(row, [*columns, *optional])
                if any(column not in values for column in columns):
                    require_columns(place, columns, values, list_fields(row))
                if is_csv:
                    _check_present(place, {column: row[column] for column in columns})
                yield place, values
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(
            f"{name}: the file cannot be read: {getattr(error, 'strerror', None) or error}. Check its permissions, "
            "and that it is complete."
        ) from error


@dataclass(frozen=True, slots=True)
class DataFiles:
    """Files of one data set: a single file, or the files of a folder in the order of their rows."""

    files: tuple[tuple[Path, str], ...]
    """Local path of each file, with its name for messages."""
    is_folder: bool

    @property
    def is_table(self) -> bool:
        """Whether the files have the format Parquet or Arrow, in which structs have the same fields in all rows."""
        return find_format(self.files[0][0]) not in TEXT_SUFFIXES


def find_data_files(path: Path) -> DataFiles:
    """Return the data files at a path, which names a file, a folder or a dataset on the Hugging Face Hub. Files in a
    bucket or on the Hub are downloaded first.

    Raises BadInput if there is no such file, or if the format cannot be read.
    """
    if is_on_hub(path) and (parts := split_into_files(path)) != [path]:
        return DataFiles(tuple((fetch_path(part), format_path(part)) for part in parts), is_folder=True)
    here, name = fetch_path(path), format_path(path)
    try:
        if here.is_dir():
            files = list_data_files(here, name, formats=DATA_SUFFIXES, packed=PACKED_SUFFIXES)
            return DataFiles(tuple((each, f"{name}/{each.name}") for each in files), is_folder=True)
        if find_format(path) not in DATA_SUFFIXES:
            packed = ", ".join(f"{suffix}{packing}" for packing in PACKED_SUFFIXES for suffix in TEXT_SUFFIXES)
            raise BadInput(
                f"{path}: files with the suffix {path.suffix!r} cannot be read. Use one of {', '.join(DATA_SUFFIXES)}, "
                f"{packed}, or a folder of such files."
            )
        kind = describe_irregular(here)
    except OSError as error:
        reason = (
            "no such file" if isinstance(error, FileNotFoundError) else f"the file cannot be read: {error.strerror}"
        )
        raise BadInput(f"{name}: {reason}{'' if here.is_absolute() else f' (looked in {Path.cwd()})'}") from None
    if kind:
        raise BadInput(
            f"{name}: the path must name a regular file or a folder of data files, but it is {kind}. Set another path."
        )
    return DataFiles(((here, name),), is_folder=False)


PEEKED_ROWS: Final = 16
"""Number of rows at the start of a file from which its shape is recognized."""


def peek_rows(path: Path) -> tuple[list[str], list[Mapping[str, object]]]:
    """Return the names of the columns and the first rows of a data set. Nested fields are named by dotted paths. Of a
    folder, only the first file is read.

    Only the first file of a folder is read. Both lists are empty if the rows cannot be read: `read_rows` reports the
    reason. Raises BadInput if there is no such file.
    """
    here, name = find_data_files(path).files[0]
    with suppress(BadInput, OSError, EOFError, zlib.error, ValueError, pa.ArrowException):
        if find_format(here) not in TEXT_SUFFIXES:
            return peek_table(here, PEEKED_ROWS)
        rows = [row for _, row in islice(text_rows(here, InputErrors(), name=name), PEEKED_ROWS)]
        return list(dict.fromkeys(column for row in rows for column in list_fields(row))), rows
    return [], []


def _check_present(place: str, values: Mapping[str, object]) -> None:
    """Raise BadInput, which names the row as `place`, if a value of a CSV file is a text that data frames write for a
    missing value."""
    for column, value in values.items():
        if isinstance(value, str) and value.strip() in MISSING_IN_CSV:
            kind = BadInput if value.strip().lstrip("-") == "inf" else EmptyRow
            raise kind(
                f"{place}: {column}: expected a value, found {value.strip()!r}, which stands for a missing value or an "
                "infinite number in CSV and TSV files. Fill in the value, or remove the row. If the text is meant, use "
                "JSON lines."
            )


def find_format(path: Path) -> str:
    """Return the file name suffix that names the format of a file. For `train.jsonl.gz` this is `.jsonl`."""
    inner = Path(path.stem).suffix
    return inner if path.suffix in PACKED_SUFFIXES and inner in TEXT_SUFFIXES else path.suffix


def text_rows(path: Path, input_errors: InputErrors, *, name: str, version: int = 1) -> Iterator[FileRow]:
    """Yield the rows of a text file. All values in CSV and TSV files are text. `name` names the file in messages, and
    `version` is the version of the rules for reading files."""
    with _open(path) as content:
        match find_format(path):
            case ".jsonl":
                yield from read_json_lines(_iterate_lines(content, name), name, input_errors, version=version)
            case ".json":
                yield from read_json_array(_read_whole(content, name), name, input_errors, version=version)
            case suffix:
                delimiter = DELIMITERS[suffix]
                yield from _read_csv_rows(content, name, input_errors, version=version, delimiter=delimiter)


def _open(path: Path) -> io.BufferedIOBase:
    """Open a text file for reading bytes. A compressed file is decompressed."""
    if path.suffix == ".zst":
        return io.BufferedReader(cast(io.RawIOBase, pa.input_stream(str(path), compression="zstd")))
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _iterate_lines(content: LineReader[T], name: str) -> Iterator[T]:
    """Yield the lines of a file. Raises BadInput if a line is longer than `MAX_LINE_MEBIBYTES`, as in a file that is
    small but decompresses to an enormous size."""
    max_bytes = MAX_LINE_MEBIBYTES * 2**20
    for number in count(1):
        line = content.readline(max_bytes)
        if len(line) >= max_bytes:
            raise BadInput(
                f"{name}:{number}: the line is longer than {MAX_LINE_MEBIBYTES} MiB, the maximum for one row. Shorten "
                "the row, or check that rows are separated by line ends."
            )
        if not line:
            return
        yield line


def _read_whole(content: io.BufferedIOBase, name: str) -> bytes:
    """Return the whole content of a file after decompression. Raises BadInput if it is larger than
    `MAX_ARRAY_MEBIBYTES`."""
    max_bytes, encoded = MAX_ARRAY_MEBIBYTES * 2**20, bytearray()
    while len(encoded) < max_bytes and (
        piece := content.read(READ_BYTES)
    ):  # `read(max_bytes)` would allocate all of it
        encoded += piece
    if len(encoded) >= max_bytes:
        raise BadInput(
            f"{name}: the file has more than {MAX_ARRAY_MEBIBYTES} MiB, the maximum for a JSON array. Write one "
            "object per line to a .jsonl file instead."
        )
    return bytes(encoded)


def _read_csv_rows(
    content: io.BufferedIOBase, name: str, input_errors: InputErrors, *, version: int, delimiter: str
) -> Iterator[FileRow]:
    """Yield the rows of a CSV or TSV file whose first line names the columns. Raises BadInput if the file is not valid
    or not in UTF-8."""
    csv.field_size_limit(sys.maxsize)  # instead of 128 KiB
    text = io.TextIOWrapper(cast(IO[bytes], content), encoding="utf-8-sig", errors="surrogateescape", newline="")
    rows = csv.reader(_iterate_lines(text, name), strict=True, delimiter=delimiter)
    try:
        header = next(rows, [])
        _check_cells(f"{name}:1: the header", header)
        if version > 1:
            check_unique_columns(f"{name}:1", [column for column in header if column])
        for row in filter(None, rows):
            place = f"{name}:{rows.line_num}"
            with input_errors.collect(place):
                if len(row) != len(header):
                    raise BadInput(
                        f"{place}: the row has {format_count(len(row), 'column')}, but the header in the first line "
                        f"has {len(header)}. Add the missing values, or put quotes around values that contain the "
                        "separator."
                    )
                _check_cells(place, row, header)
                yield place, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise BadInput(
            f"{name}:{rows.line_num}: the file is not valid {'CSV' if delimiter == ',' else 'TSV'} in UTF-8: {error}"
        ) from error


def _check_cells(place: str, cells: Sequence[str], header: Sequence[str] = ()) -> None:
    """Raise BadInput, which names the row as `place`, if a cell contained bytes that are not UTF-8. They were decoded
    to surrogate characters."""
    for index, cell in enumerate(cells):
        if not cell.isascii():
            where = f"{place}: {header[index]}" if header else f"{place}, column {index + 1}"
            decode_text(where, cell.encode("utf-8", "surrogateescape"))
