"""Sealed Parquet copies of what a run holds, for analysts; the run itself never reads them."""

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from infra.errors import BadInput
from infra.store.runs import Run


def export_parquet(run: Run, tables: Iterable[pa.Table], key: str) -> Path:
    """Write `export/<key>.parquet` from tables of one schema, unless it is there, and return a local path of it.

    Tables are taken one at a time, so a generator never holds more than one in memory.
    """
    target = f"export/{key}.parquet"
    if not run.store.exists(target):
        with run.store.scratch() as scratch:
            path = scratch / "export.parquet"
            _write(tables, path, key=key)
            run.store.put(target, path)
    return run.store.local(target)


def _write(tables: Iterable[pa.Table], path: Path, *, key: str) -> None:
    remaining = iter(tables)
    first = next(remaining, None)
    if first is None:
        raise BadInput(f"export {key!r}: expected at least one table, found none")
    schema = first.schema.remove_metadata()  # each shard's metadata is about that shard alone
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        writer.write_table(first.cast(schema))
        for table in remaining:
            if not table.schema.equals(schema):
                raise BadInput(f"export {key!r}: expected columns {schema.names} of one schema, found {table.schema}")
            writer.write_table(table.cast(schema))
