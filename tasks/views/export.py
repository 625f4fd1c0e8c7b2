"""What leaves a run as Parquet: its rollouts and scores.

Needs neither Prefect's API nor a worker. The run itself never reads what was exported.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from infra.config import RECORDED, read_recorded
from infra.errors import BadInput
from infra.store.manifests import Manifest
from infra.store.runs import Run
from infra.store.shards import read_shard
from models.algorithms.advantages import informative_groups
from models.algorithms.experience import ScoredGroups
from models.config.algorithms import Algorithm, AlgorithmConfig
from models.config.rewards import ScoringConfig
from models.config.rollout import RolloutConfig
from models.credit.inputs import TermColumns, term_columns
from models.credit.selection import group_columns, informative_by
from models.records.columns import Mask, row_arrays
from models.records.schemas import EXPERTS
from tasks.run.batch import rollouts_of, with_rollouts
from tasks.run.iteration import Iteration
from tasks.run.keys import StageKey, iteration_key
from tasks.run.rescorings import Derived, rescoring_terms, sealed_numbers
from tasks.views.metrics import sealed_iterations
from tasks.views.runs import detect_deletion, known_rescoring, open_known_run

Place = tuple[int, int]
"""Prompt row and sample."""

PLACE: Final = ("prompt_row", "sample")


def export_run(store: str, name: str, *, scores: str | None = None) -> list[str]:
    """Write one Parquet file per sealed iteration: rollouts with their scores; return where they are.

    `scores` names a re-scoring: then its iterations, with its scores. Those whose rollouts were deleted are left out.
    """
    run = open_known_run(store, name)
    with detect_deletion(run):
        if scores is None:
            numbers: Sequence[int] = [StageKey.parse(seal.key).iteration for seal in sealed_iterations(run)]
            if not numbers:
                raise BadInput(f"run {name!r} has no sealed iteration yet: nothing to export")
            return [
                export_parquet(run, exported(run, number), iteration_key(number))
                for number in with_rollouts(run, numbers)
            ]
        derived = known_rescoring(run, scores)
        numbers = sealed_numbers(run, derived)
        if not numbers:
            raise BadInput(f"{derived.label} of run {name!r} has no iteration that is complete: nothing to export")
        return [
            export_parquet(run, exported(run, number, derived), derived.iteration_key(number))
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


def exported(run: Run, number: int, derived: Derived | None = None) -> Iterator[pa.Table]:
    """An iteration's rollouts beside their scores and groups, shard by shard, with run and iteration as columns.

    `advantages` are those that the update learnt from, of each of a completion's tokens but the prompts that turns have
    of their own; null where it did not learn from the completion. A re-scoring has its scores, and no advantages.
    What routers chose, where that was noted, is left out.
    """
    iteration = Iteration(run, number)
    prefix = "" if derived is None else derived.prefix
    informative, terms = _rule(run, derived)
    made = run.find(iteration.stage_key("estimates"))
    scored = iteration.scored()
    estimates = {} if made is None else dict(zip((each.key for each in scored.rollouts), made.shards, strict=True))
    advantages = _advantages(iteration) if derived is None else None
    for rollouts in rollouts_of(run, number):
        table = read_shard(run.store, rollouts.shards[0])
        table = table.select([name for name in table.column_names if name != EXPERTS])
        scores = _scores(run, rollouts, prefix)
        asked = [read_shard(run.store, estimates[rollouts.key])] if rollouts.key in estimates else []
        columns = {name: scores[name] for name in scores.column_names if name not in PLACE}
        if advantages is not None:
            places = zip(*(table[name].to_pylist() for name in PLACE), strict=True)
            columns["advantages"] = pa.array([advantages.get(place) for place in places], pa.list_(pa.float32()))
        columns |= group_columns(table, scores, asked, terms=terms, informative=informative)
        for name, column in columns.items():
            table = table.append_column(name, column)
        table = table.add_column(0, "iteration", pa.array([number] * table.num_rows, pa.int32()))
        yield table.add_column(0, "run", pa.array([run.name] * table.num_rows, pa.string()))


def _scores(run: Run, rollouts: Manifest, prefix: str) -> pa.Table:
    scored = run.find(StageKey.parse(rollouts.key).at("scoring").below(prefix))
    assert scored is not None, "a sealed iteration has scores for every rollout shard"
    return read_shard(run.store, scored.shards[0])


def _advantages(iteration: Iteration) -> dict[Place, np.ndarray]:
    """What the update learnt from, by completion; the turns of an episode one after the other."""
    found: dict[Place, list[np.ndarray]] = {}
    for shard in iteration.credit.shards:
        samples = read_shard(iteration.run.store, shard, [*PLACE, "advantages"])
        places = zip(*(samples[name].to_pylist() for name in PLACE), strict=True)
        for place, advantages_T in zip(places, row_arrays(samples["advantages"], np.float32), strict=True):
            found.setdefault(place, []).append(advantages_T)
    return {place: np.concatenate(parts) for place, parts in found.items()}


def _rule(run: Run, derived: Derived | None) -> tuple[Callable[[ScoredGroups], Mask] | None, tuple[TermColumns, ...]]:
    """What makes groups informative, and the terms of their scores.

    An algorithm of a user's is not asked: who only reads a run imports no code that it names.
    """
    config = run.record.config
    again = None if derived is None else rescoring_terms(run, derived.name)
    scoring = read_recorded(ScoringConfig, config["scoring"]) if again is None else again.scoring
    dynamic = read_recorded(RolloutConfig, config["rollout"]).dynamic
    terms, given = term_columns(scoring), config["algorithm"]
    if isinstance(given, dict) and given["kind"] == "target":
        return None, terms
    algorithm = TypeAdapter[Algorithm](AlgorithmConfig).validate_python(given, context=RECORDED)
    if dynamic is None or again is not None:
        return partial(informative_groups, algorithm=algorithm), terms
    return partial(informative_by, algorithm=algorithm, metric=dynamic.metric or terms[0].name), terms


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
