"""Nested fields of the rows of data files, named by dotted paths such as `reward_model.ground_truth`.

A column or field whose own name contains the dots takes precedence over a nested field.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import pyarrow as pa

MAX_DEPTH: Final = 4
"""Maximum depth up to which error messages list nested fields."""


def find_field(row: Mapping[str, object], path: str) -> object:
    """Return the value of a column of a row. `path` is the column's name, or a dotted path to a nested field.

    Null if an object on the path is null, as in tables. Raises KeyError if there is no such column or field.
    """
    if path in row:
        return row[path]
    for head, rest in _split_path(path):
        match row.get(head, row):
            case None:
                return None
            case Mapping() as inner if inner is not row:
                if has_field(inner, rest):
                    return find_field(inner, rest)
    raise KeyError(path)


def has_field(row: Mapping[str, object], path: str) -> bool:
    """Return whether a row has a column, or a nested field, with this name or dotted path."""
    try:
        find_field(row, path)
    except KeyError:
        return False
    return True


def find_root(schema: pa.Schema | pa.StructType, path: str) -> str | None:
    """Return the name of the table column that contains a field with this name or dotted path, or None if there is
    none.

    Keys of maps differ from row to row, so every name is assumed to exist in a map.
    """
    kinds = {field.name: field.type for field in schema}
    if path in kinds:
        return path
    for head, rest in _split_path(path):
        kind = kinds.get(head)
        if kind is not None and (
            pa.types.is_map(kind) or (pa.types.is_struct(kind) and find_root(kind, rest) is not None)
        ):
            return head
    return None


def add_fields(row: Mapping[str, object], paths: Sequence[str]) -> Mapping[str, object]:
    """Return a row with additional columns: the values of nested fields, named by their dotted paths. Fields that the
    row lacks are not added."""
    nested = {path: find_field(row, path) for path in paths if path not in row and has_field(row, path)}
    return {**row, **nested} if nested else row


def list_fields(row: Mapping[str, object]) -> list[str]:
    """Return the names of a row's columns, and the dotted paths of its nested fields."""
    return [*_walk(row, lambda value: value if isinstance(value, Mapping) else {}, MAX_DEPTH)]


def list_schema_fields(schema: pa.Schema) -> list[str]:
    """Return the names of a table's columns, and the dotted paths of the fields in its structs."""

    def list_children(kind: object) -> Mapping[str, object]:
        return {field.name: field.type for field in kind} if isinstance(kind, pa.StructType) else {}

    return [*_walk({field.name: field.type for field in schema}, list_children, MAX_DEPTH)]


def _walk(
    row: Mapping[str, object], list_children: Callable[[object], Mapping[str, object]], depth: int
) -> Iterator[str]:
    for name, value in row.items():
        yield name
        if depth > 1:
            yield from (f"{name}.{inner}" for inner in _walk(list_children(value), list_children, depth - 1))


def _split_path(path: str) -> Iterator[tuple[str, str]]:
    """Yield every way to split a dotted path into a name and the remaining path, the longest name first."""
    at = path.rfind(".")
    while at > 0:
        yield path[:at], path[at + 1 :]
        at = path.rfind(".", 0, at)
