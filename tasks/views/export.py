"""What leaves a run: its rollouts and scores as Parquet, a policy as one directory of its own.

Needs neither Prefect's API nor a worker. The run itself never reads what was exported. Base and adapter are merged in
a process of its own: no flow process loads torch.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from infra.config import Settings
from infra.errors import BadInput, WorkerFailed
from infra.processes.guard import guarded_directory
from infra.processes.watch import await_answer
from infra.store.bundles import fetch_bundle
from infra.store.manifests import Manifest
from infra.store.runs import Run
from infra.store.shards import read_shard
from models.records.versions import policy_of
from models.records.work import ExportWork
from tasks.run.batch import rollouts_of, with_rollouts
from tasks.run.keys import DPO, SFT, StageKey, iteration_key
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


class PolicyExport(Settings):
    """A policy that was written to a directory."""

    run: str
    """Name of its run."""
    iteration: int
    """Iterations after which it is the policy."""
    digest: str
    """Proves which policy of the run it is."""
    merged: bool
    """Whether an adapter was added to its base."""
    path: str
    """The directory, in Hugging Face format."""


def export_policy(
    run: Run, target: Path, *, iteration: int | None, dtype: Literal["float32", "bfloat16"] | None
) -> PolicyExport:
    """Write the policy after an iteration, by default the last sealed one, into a directory that is not there yet.

    The directory appears when it is whole. Raises BadInput before anything is written.
    """
    sealed = len(sealed_iterations(run))
    number = sealed if iteration is None else iteration
    if not 0 <= number <= sealed:
        raise BadInput(f"run {run.name!r}: no policy after iteration {number}, expected 0 to {sealed}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadInput(f"{target}: expected a directory that is not there yet or is empty, found one with files in it")
    policy = policy_of(_policy(run, number))
    base = fetch_bundle(run.store, policy.weights)
    adapter = None if policy.adapter is None else fetch_bundle(run.store, policy.adapter)
    target.parent.mkdir(parents=True, exist_ok=True)
    with guarded_directory(f".{target.name}-", parent=target.parent) as scratch:
        written = scratch / "policy"
        written.mkdir()
        _ask(ExportWork(base=base, adapter=adapter, target=written, dtype=dtype))
        written.replace(target)
    return PolicyExport(
        run=run.name, iteration=number, digest=policy.digest, merged=adapter is not None, path=str(target)
    )


def _policy(run: Run, number: int) -> Manifest:
    """The policy's manifest. A run that was told to end after SFT or DPO has no initial policy yet, but that one."""
    keys = [StageKey.policy(number)] if number else [StageKey.policy(0), DPO, SFT]
    found = [manifest for key in keys if (manifest := run.find(key)) is not None]
    return found[0] if found else run.require(keys[0])


def _ask(work: ExportWork) -> None:
    command = [sys.executable, "-P", "-m", "models.commands.export"]
    code, answer, errors = await_answer("the export", command, TypeAdapter(ExportWork).dump_json(work))
    try:
        error = json.loads(answer)["error"]
    except ValueError:
        raise WorkerFailed(f"the export ended with code {code}: {errors.decode()[-2000:]}") from None
    if error:
        raise BadInput(error)
