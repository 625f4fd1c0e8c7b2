"""Notes in the plan of a run about columns of data files that look like prompts but are not read."""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rheostat.infra.config import Settings
from rheostat.infra.errors import BadInput, InputErrors
from rheostat.infra.store.inputs import fetch_path, format_path
from rheostat.models.config.data import ProblemFile
from rheostat.models.data.problems import Problem
from rheostat.models.data.rows import find_format, text_rows
from rheostat.models.data.shapes import IMAGE_COLUMNS


def list_column_notes(data: Settings, problems: Sequence[Problem]) -> Iterator[str]:
    """Yield a note for each data file with a column of images or tools that the configuration does not read. `problems`
    are the problems of `data`."""
    with_text = {problem.source.rpartition(":")[0] for problem in problems if isinstance(problem.prompt, str)}
    for file, path in _iterate_files(data):
        names = _read_column_names(path)
        read = {file.prompt_column, file.answer_column, *file.environment_columns}
        for name in IMAGE_COLUMNS:
            if file.images_column is None and name in names and name not in read:
                yield (
                    f"{format_path(path)} has a column {name!r}, which is not read, so prompts have no images. Set "
                    f"images_column = {name!r} to show the images to the policy."
                )
        columns = file.argument_columns
        ignored = [name for name in columns if name in names and name not in read]
        if ignored and format_path(path) in with_text:
            yield (
                f"{format_path(path)} has plain-text prompts and a column {' and '.join(map(repr, ignored))}, which is "
                "only read for chats. Write the prompts as lists of messages, or set system, to show it to the policy."
            )


def _iterate_files(data: Settings) -> Iterator[tuple[ProblemFile, Path]]:
    """Yield the path of each file of problems that `data` names, with the settings for reading it."""
    if isinstance(data, ProblemFile):
        yield from ((data, path) for path in (data.path, data.heldout_path) if path is not None)
    source, sources = getattr(data, "source", None), getattr(data, "sources", ())
    for each in (source, *sources):
        if isinstance(each, Settings):
            yield from _iterate_files(each)


def _read_column_names(path: Path) -> list[str]:
    """Return the names of a file's columns. In a JSON file these are the keys of the first row. Return an empty list if
    the file cannot be read."""
    with suppress(OSError, EOFError, ValueError, BadInput, zlib.error, pa.ArrowException, StopIteration):
        here = fetch_path(path)
        match find_format(path):
            case ".parquet":
                return [str(name) for name in pq.read_schema(here).names]
            case ".arrow" | ".feather":
                with pa.memory_map(str(here)) as mapped:
                    is_file = mapped.read(6) == b"ARROW1"
                    mapped.seek(0)
                    schema = (pa.ipc.open_file(mapped) if is_file else pa.ipc.open_stream(mapped)).schema
                    return [str(name) for name in schema.names]
            case _:
                return list(next(text_rows(here, InputErrors(), name=str(path)))[1])
    return []
