"""Layouts of stored shards: a changed schema has the next version, and shards of every older layout are read."""

import tomllib
from pathlib import Path

import pyarrow as pa
import pytest

from rheostat.infra.store.shards import read_shard, write_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.records.schemas import KINDS

LAYOUTS = tomllib.loads(Path(__file__).with_name("layouts.toml").read_text())
"""Columns of every layout, by kind and version."""
OLDER = [(kind, columns) for kind in KINDS for columns in [*LAYOUTS[kind.name].values()][:-1]]


def read_field(text: str) -> pa.Field:
    """Return the column or field of a struct that a text such as "turns: list<item: int32>" describes."""
    name, _, kind = text.partition(": ")
    return pa.field(name, read_type(kind))


def read_type(text: str) -> pa.DataType:
    """Return the Arrow type with this text."""
    outer, _, inner = text.removesuffix(">").partition("<")
    if outer == "list":
        return pa.list_(read_field(inner).type)
    if outer == "struct":
        return pa.struct([read_field(field) for field in inner.split(", ")])
    return pa.type_for_alias(text)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_schema_is_the_one_that_is_listed_for_its_version(kind):
    version, columns = [*LAYOUTS[kind.name].items()][-1]
    now = [f"{column.name}: {column.type}" for column in kind.schema]
    assert (version, columns) == (f"v{kind.version}", now), "a changed schema needs the next version and an entry"


@pytest.mark.parametrize(("kind", "columns"), OLDER, ids=lambda value: getattr(value, "name", ""))
def test_shards_of_an_older_layout_are_read_with_the_current_columns(kind, columns, tmp_path):
    older = pa.schema([read_field(column) for column in columns])
    store = open_store(str(tmp_path))
    ref = write_shard(store, older.empty_table(), kind=kind.name, metadata={})
    assert read_shard(store, ref).schema.equals(kind.schema)
