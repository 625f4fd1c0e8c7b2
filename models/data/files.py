"""Problems from JSON, CSV, Parquet and Arrow files, as texts or chats.

Each error message names its place in the file.
"""

import csv
import difflib
import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import IO, Final, Protocol, TypeVar, cast

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import JsonValue

from infra.errors import BadInput, InputErrors
from infra.store.inputs import fetch_path, format_path, is_remote
from infra.user_files import describe_irregular
from models.config.data import ProblemFile
from models.data.images import read_images
from models.data.messages import read_prompt, read_text
from models.data.problems import (
    Problem,
    add_system_message,
    check_columns,
    check_places,
    fill_prompt,
    is_heldout,
)

T = TypeVar("T", str, bytes, covariant=True)


class LineReader(Protocol[T]):
    """File that is read line by line: a buffered binary file or a text file."""

    def readline(self, size: int, /) -> T:
        """Return the next line, at most `size` bytes or characters of it. Empty at the end of the file."""
        ...


FileRow = tuple[str, Mapping[str, object]]
"""Place of the row for messages, and the columns of the row."""

TEXTS: Final = (".jsonl", ".json", ".csv")
"""Suffixes of text files, which may be followed by `.gz`."""
MAX_LINE_MEBIBYTES: Final = 256
"""Maximum length of a line after decompression, in MiB."""
MAX_ARRAY_MEBIBYTES: Final = 2048
"""Maximum size of a JSON array after decompression, in MiB, because an array is read as a whole."""
READ_BYTES: Final = 2**20
"""Size of one read, in bytes."""
SUFFIXES: Final = (*TEXTS, ".parquet", ".arrow")


def read_rows(
    path: Path, columns: Sequence[str], input_errors: InputErrors, *, optional: Sequence[str] = ()
) -> Iterator[FileRow]:
    """Yield the rows of one file in order. Each row must have the given columns, and may have the optional ones.

    Invalid rows are added to `input_errors`. Raises BadInput if the file cannot be read.
    """
    _check_is_no_hub_name(path)
    if find_format(path) not in SUFFIXES:
        packed = ", ".join(f"{suffix}.gz" for suffix in TEXTS)
        raise BadInput(
            f"{path}: files with the suffix {path.suffix!r} cannot be read. Use one of {', '.join(SUFFIXES)}, {packed}."
        )
    here, name = fetch_path(path), format_path(path)
    try:
        kind = describe_irregular(here)
    except OSError as error:
        reason = (
            "no such file" if isinstance(error, FileNotFoundError) else f"the file cannot be read: {error.strerror}"
        )
        raise BadInput(f"{name}: {reason}{'' if here.is_absolute() else f' (looked in {Path.cwd()})'}") from None
    if kind:
        raise BadInput(f"{name}: expected a file, but the path is {kind}")
    try:
        if find_format(path) not in TEXTS:
            yield from _read_table_rows(here, columns, optional=optional, name=name)
            return
        for place, row in text_rows(here, input_errors, name=name):
            with input_errors.collect(place):
                _require_columns(place, columns, list(row))
                yield place, row
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{name}: the file cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _check_is_no_hub_name(path: Path) -> None:
    """Raise BadInput with the next step if a path looks like the name of a dataset on the Hugging Face Hub."""
    if find_format(path) not in SUFFIXES and not is_remote(path) and not path.parent.exists():
        name = "/".join(path.parts[-2:])
        raise BadInput(
            f"{path}: no such file. If {name} is a dataset on the Hugging Face Hub, write it to a file first: "
            f"datasets.load_dataset({name!r}, split='train').to_parquet('train.parquet')"
        )


def find_format(path: Path) -> str:
    """Return the suffix that determines the format of a file, ignoring `.gz`."""
    inner = Path(path.stem).suffix
    return inner if path.suffix == ".gz" and inner in TEXTS else path.suffix


def is_table(path: Path) -> bool:
    """Return whether a file is a Parquet or Arrow file, whose structs have the same fields in all rows."""
    return find_format(path) not in TEXTS


def text_rows(path: Path, input_errors: InputErrors, *, name: str) -> Iterator[FileRow]:
    """Yield the rows of a text file. Values in CSV files are always text."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as content:
        match find_format(path):
            case ".jsonl":
                yield from _read_json_lines(content, name, input_errors)
            case ".json":
                yield from _read_json_array(content, name, input_errors)
            case _:
                yield from _read_csv_rows(content, name, input_errors)


def _iterate_lines(content: LineReader[T], name: str) -> Iterator[T]:
    """Yield the lines of a file. Raises BadInput if a line is longer than `MAX_LINE_MEBIBYTES`, as in a packed bomb."""
    max_bytes = MAX_LINE_MEBIBYTES * 2**20
    for number in count(1):
        line = content.readline(max_bytes)
        if len(line) >= max_bytes:
            raise BadInput(f"{name}:{number}: the line is longer than the maximum of {MAX_LINE_MEBIBYTES} MiB")
        if not line:
            return
        yield line


def _read_json_lines(content: io.BufferedIOBase, name: str, input_errors: InputErrors) -> Iterator[FileRow]:
    """Yield the objects of a JSON lines file. Blank lines are skipped."""
    for number, line in enumerate(_iterate_lines(content, name), start=1):
        if not line.strip():
            continue
        place = f"{name}:{number}"
        with input_errors.collect(place):
            yield (
                place,
                _require_object(place, _parse_json_line(place, line, encoding="utf-8-sig" if number == 1 else "utf-8")),
            )


def _parse_json_line(place: str, line: bytes, *, encoding: str) -> object:
    """Parse a JSON line. Raises BadInput if it is not valid JSON."""
    try:
        return json.loads(line.decode(encoding).strip())
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{place}: the line is not valid JSON: {error}") from error


def _read_json_array(content: io.BufferedIOBase, name: str, input_errors: InputErrors) -> Iterator[FileRow]:
    """Yield the objects of a JSON array. Raises BadInput if the file is too large or is not a JSON array."""
    max_bytes, encoded = MAX_ARRAY_MEBIBYTES * 2**20, bytearray()
    while len(encoded) < max_bytes and (
        piece := content.read(READ_BYTES)
    ):  # `read(max_bytes)` would allocate all of it
        encoded += piece
    if len(encoded) >= max_bytes:
        raise BadInput(
            f"{name}: the file is larger than the maximum of {MAX_ARRAY_MEBIBYTES} MiB for a JSON array. "
            "Write one object per line to a .jsonl file instead."
        )
    try:
        rows = json.loads(encoded.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise BadInput(
            f"{name}: the file is not valid JSON: {error}. If the file has one object per line, name it .jsonl."
        ) from error
    if not isinstance(rows, list):
        raise BadInput(f"{name}: expected a JSON array of objects, found {type(rows).__name__}")
    for number, row in enumerate(rows):
        place = f"{name}[{number}]"
        with input_errors.collect(place):
            yield place, _require_object(place, row)


def _require_object(place: str, row: object) -> Mapping[str, object]:
    """Return a row if it is a JSON object. Raises BadInput if not."""
    if not isinstance(row, dict):
        raise BadInput(f"{place}: expected a JSON object, found {type(row).__name__}")
    return row


def _read_csv_rows(content: io.BufferedIOBase, name: str, input_errors: InputErrors) -> Iterator[FileRow]:
    """Yield the rows of a CSV file with a header line. Raises BadInput if the file is not CSV in UTF-8."""
    csv.field_size_limit(sys.maxsize)  # instead of 128 KiB
    text = io.TextIOWrapper(cast(IO[bytes], content), encoding="utf-8-sig", newline="")
    rows = csv.reader(_iterate_lines(text, name), strict=True)
    try:
        header = next(rows, [])
        for row in filter(None, rows):
            place = f"{name}:{rows.line_num}"
            with input_errors.collect(place):
                if len(row) != len(header):
                    raise BadInput(f"{place}: expected {len(header)} columns like the first line, found {len(row)}")
                yield place, dict(zip(header, row, strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        raise BadInput(f"{name}:{rows.line_num}: the file is not valid CSV in UTF-8: {error}") from error


def _read_table_rows(path: Path, columns: Sequence[str], *, optional: Sequence[str], name: str) -> Iterator[FileRow]:
    """Yield the rows of a Parquet or Arrow file. Raises BadInput if the file is invalid or lacks a column."""
    try:
        table = pq.ParquetFile(path).read() if path.suffix == ".parquet" else _read_arrow(path)
    except pa.ArrowException as error:
        raise BadInput(f"{name}: the file is not a valid {path.suffix} file: {str(error).splitlines()[0]}") from error
    _require_columns(name, columns, table.column_names)
    number = 0
    selected = [*columns, *(column for column in optional if column in table.column_names and column not in columns)]
    for batch in table.select(selected).to_batches(max_chunksize=4096):
        for row in batch.to_pylist():
            yield f"{name} row {number}", row
            number += 1


def _read_arrow(path: Path) -> pa.Table:
    """Read an Arrow IPC file or stream. `datasets` writes streams with the suffix `.arrow`."""
    with pa.OSFile(str(path)) as file:
        if file.read(6) == b"ARROW1":
            return pa.ipc.open_file(file).read_all()
        file.seek(0)
        return pa.ipc.open_stream(file).read_all()


def _require_columns(place: str, required: Sequence[str], columns: Sequence[str]) -> None:
    """Raise BadInput if a required column is missing. The message suggests the nearest name."""
    for column in required:
        if column not in columns:
            nearest = difflib.get_close_matches(column, columns, n=1)
            hint = f", did you mean {nearest[0]!r}?" if nearest else "."
            raise BadInput(
                f"{place}: there is no column {column!r}{hint} The columns are: {', '.join(columns) or 'none'}."
            )


def file_problems(data: ProblemFile, split: str, seed: int) -> list[Problem]:
    """Read the problems of a split in file order and apply the template.

    Raises BadInput if the template has no `{prompt}`, a row is invalid or the split is empty.
    """
    if "{prompt}" not in data.template:
        raise BadInput(
            f"data.template {data.template!r} does not contain {{prompt}}, so all prompts would be the same. "
            "Add {prompt} to the template."
        )
    if data.heldout_path is not None:
        problems = read_problems(data.path if split == "train" else data.heldout_path, data)
    else:
        in_heldout = split == "heldout"
        problems = [
            problem
            for problem in read_problems(data.path, data)
            if is_heldout(problem.identity, data.heldout_fraction) == in_heldout
        ]
    if not problems:
        raise BadInput(
            f"{data.path}: data.heldout_fraction = {data.heldout_fraction} leaves no {split} problem. "
            "Add problems, change the fraction, or set data.heldout_path."
        )
    return [_apply_template(problem, data) for problem in problems]


def read_problems(path: Path, data: ProblemFile) -> list[Problem]:
    """Read all problems of a file, before the template and the split are applied.

    Raises one BadInput that lists all invalid rows.
    """
    named = [
        data.prompt_column,
        data.answer_column,
        data.images_column,
        *data.environment_columns,
        *data.required_chat_columns,
    ]
    columns, optional = list(dict.fromkeys(filter(None, named))), data.optional_chat_columns
    root = data.images_root or path.parent
    problems, input_errors = list[Problem](), InputErrors()
    for place, row in islice(read_rows(path, columns, input_errors, optional=optional), data.limit):
        with input_errors.collect(place):
            problems.append(_build_problem(place, row, data, root=root, is_table=is_table(path)))
    input_errors.check()
    if not problems:
        raise BadInput(f"{path}: the file is empty. Expected at least one problem.")
    if data.chat_template_kwargs and data.system is None and all(isinstance(each.prompt, str) for each in problems):
        raise BadInput(
            f"{path}: data.chat_template_kwargs has no effect, because all prompts are plain text. Use chats, set "
            "data.system, or remove data.chat_template_kwargs."
        )
    return problems


def _build_problem(place: str, row: Mapping[str, object], data: ProblemFile, *, root: Path, is_table: bool) -> Problem:
    """Build a problem from a row. Raises BadInput if the row is invalid."""
    prompt, template = read_prompt(place, row, data, is_table=is_table, is_chat=data.system is not None)
    answer = _read_answer(place, row[data.answer_column], data.answer_column) if data.answer_column else ""
    images = read_images(row, data.images_column, place=place, root=root) if data.images_column else ()
    check_places(prompt, len(images), source=place)
    columns = {column: cast(JsonValue, row[column]) for column in data.environment_columns}
    check_columns(columns, source=place)  # tables can contain dates and bytes
    return Problem(source=place, prompt=prompt, answer=answer, images=images, columns=columns, template=template)


def _read_answer(place: str, value: object, column: str) -> str:
    """Return the reference answer as text. Numbers are converted, other values must be non-blank text."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return read_text(place, value, column)


def _apply_template(problem: Problem, data: ProblemFile) -> Problem:
    """Fill the prompt into the template and add the system message, if one is configured."""
    prompt = fill_prompt(problem.prompt, data.template)
    return replace(problem, prompt=prompt if data.system is None else add_system_message(prompt, data.system))
