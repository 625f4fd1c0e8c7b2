"""What leaves a run as Parquet: its rollouts and scores.

Needs neither Prefect's API nor a worker. The run itself never reads what was exported.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from infra.errors import BadInput
from infra.store.runs import Run
from infra.store.shards import read_shard
from tasks.run.batch import rollouts_of, with_rollouts
from tasks.run.keys import StageKey, iteration_key
from tasks.run.rescorings import sealed_numbers
from tasks.views.metrics import sealed_iterations
from tasks.views.runs import known_rescoring, open_known_run


def export_run(store: str, name: str, *, scores: str | None = None) -> list[str]:
    """Write one Parquet file per sealed iteration: rollouts with their scores; return where they are.

    `scores` names a re-scoring: then its iterations, with its scores. Those whose rollouts were deleted are left out.
    """
    run = open_known_run(store, name)
    if scores is None:
        numbers: Sequence[int] = [StageKey.parse(seal.key).iteration for seal in sealed_iterations(run)]
        if not numbers:
            raise BadInput(f"run {name!r} has no sealed iteration yet: nothing to export")
        return [
            export_parquet(run, exported(run, number), iteration_key(number)) for number in with_rollouts(run, numbers)
        ]
    derived = known_rescoring(run, scores)
    numbers = sealed_numbers(run, derived)
    if not numbers:
        raise BadInput(f"{derived.label} of run {name!r} has no iteration that is complete: nothing to export")
    return [
        export_parquet(run, exported(run, number, prefix=derived.prefix), derived.iteration_key(number))
        for number in with_rollouts(run, numbers)
    ]


def export_parquet(run: Run, tables: Iterable[pa.Table], key: str) -> str:
    """Write `export/<key>.parquet` from tables of one schema, unless it is there, and say where it is.

    Tables are taken one at a time, so a generator never holds more than one in memory.
    """
    target = export_file(key)
    if not run.store.exists(target):
        with run.store.scratch() as scratch:
            path = scratch / "export.parquet"
            write_export(tables, path, key=key)
            run.store.put(target, path)
    return run.store.locate(target)


def export_file(key: str) -> str:
    """Name the object of an exported iteration."""
    return f"export/{key}.parquet"


def exported(run: Run, number: int, *, prefix: str = "") -> Iterator[pa.Table]:
    """An iteration's rollouts and scores side by side, shard by shard, with run and iteration as columns."""
    for rollouts in rollouts_of(run, number):
        table = read_shard(run.store, rollouts.shards[0])
        scored = run.find(StageKey.parse(rollouts.key).at("scoring").below(prefix))
        assert scored is not None, "a sealed iteration has scores for every rollout shard"
        scores = read_shard(run.store, scored.shards[0])
        for name in scores.column_names:
            if name not in ("prompt_row", "sample"):
                table = table.append_column(name, scores[name])
        table = table.add_column(0, "iteration", pa.array([number] * table.num_rows, pa.int32()))
        yield table.add_column(0, "run", pa.array([run.name] * table.num_rows, pa.string()))


def write_export(tables: Iterable[pa.Table], path: Path, *, key: str) -> None:
    """Write tables of one schema to a Parquet file, one at a time."""
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
