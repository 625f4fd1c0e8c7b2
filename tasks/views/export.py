"""Export of rollouts, scores and advantages as Parquet files, for analysis with other tools.

Exporting needs neither Prefect's API nor a worker. The run itself never reads exported files.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from rheostat.infra.config import RECORDED, read_recorded
from rheostat.infra.errors import BadInput
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import Run
from rheostat.infra.store.shards import read_shard
from rheostat.models.algorithms.advantages import informative_groups
from rheostat.models.algorithms.experience import ScoredGroups
from rheostat.models.config.algorithms import Algorithm, AlgorithmConfig
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.config.rollout import RolloutConfig
from rheostat.models.credit.inputs import TermColumns, term_columns
from rheostat.models.credit.selection import group_columns, informative_by
from rheostat.models.records.columns import Mask, row_arrays
from rheostat.models.records.schemas import EXPERTS
from rheostat.tasks.run.batch import iterations_with_rollouts, rollouts_of
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.run.keys import StageKey, iteration_key
from rheostat.tasks.run.rescorings import DerivedResult, rescoring_terms, sealed_numbers
from rheostat.tasks.views.metrics import sealed_iterations
from rheostat.tasks.views.runs import detect_deletion, known_rescoring, open_known_run

Place = tuple[int, int]
"""Prompt row and sample number, which identify a completion within an iteration."""

PLACE: Final = ("prompt_row", "sample")


def export_run(store: str, name: str, *, scores: str | None = None) -> list[str]:
    """Write one Parquet file per completed iteration with its rollouts and scores, and return the locations of the
    files.

    `scores` names a rescoring: then its iterations are exported with its scores. Iterations whose rollouts were
    deleted are left out. Raises BadInput if there is nothing to export.
    """
    run = open_known_run(store, name)
    with detect_deletion(run):
        if scores is None:
            numbers: Sequence[int] = [StageKey.parse(seal.key).iteration for seal in sealed_iterations(run)]
            if not numbers:
                raise BadInput(
                    f"Run {name!r} has no completed iteration to export yet. Wait until its first iteration ends."
                )
            return [
                export_parquet(run, export_tables(run, number), iteration_key(number))
                for number in iterations_with_rollouts(run, numbers)
            ]
        derived = known_rescoring(run, scores)
        numbers = sealed_numbers(run, derived)
        if not numbers:
            raise BadInput(
                f"{derived.label} of run {name!r} has no completed iteration to export yet. Wait until its first "
                "iteration ends."
            )
        return [
            export_parquet(run, export_tables(run, number, derived), derived.iteration_key(number))
            for number in iterations_with_rollouts(run, numbers)
        ]


def export_parquet(run: Run, tables: Iterable[pa.Table], key: str) -> str:
    """Write tables with the same columns to one Parquet file in the run's `export` folder, unless the file exists.
    Return its location.

    Tables are consumed one at a time, so a generator never has more than one table in memory.
    """
    target = export_file(key)
    if not run.store.exists(target):
        with run.store.scratch() as scratch:
            path = scratch / "export.parquet"
            write_export(tables, path, key=key)
            run.store.put(target, path)
    return run.store.locate(target)


def export_file(key: str) -> str:
    """Return the key of an iteration's exported file in the store."""
    return f"export/{key}.parquet"


def export_tables(run: Run, number: int, derived: DerivedResult | None = None) -> Iterator[pa.Table]:
    """Yield tables with the completions, scores and advantages of an iteration, one table per rollout shard.

    The column `advantages` has the advantages that the update trained on, one for each token of the completion. If the
    turns or branches of an episode have separate prompts, the tokens of these prompts have no entry. The column is null
    if the update did not use the completion. With a rescoring, the scores are those of the rescoring and there is no
    column `advantages`. Recorded router choices (experts) are left out.
    """
    iteration = Iteration(run, number)
    prefix = "" if derived is None else derived.prefix
    informative, terms = _informative_rule(run, derived)
    manifest = run.find(iteration.stage_key("estimates"))
    scored = iteration.scored_rollouts()
    estimates = (
        {} if manifest is None else dict(zip((each.key for each in scored.rollouts), manifest.shards, strict=True))
    )
    advantages = _read_advantages(iteration) if derived is None else None
    for rollouts in rollouts_of(run, number):
        table = read_shard(run.store, rollouts.shards[0])
        table = table.select([name for name in table.column_names if name != EXPERTS])
        scores = _read_scores(run, rollouts, prefix)
        auxiliary = [read_shard(run.store, estimates[rollouts.key])] if rollouts.key in estimates else []
        columns = {name: scores[name] for name in scores.column_names if name not in PLACE}
        if advantages is not None:
            places = zip(*(table[name].to_pylist() for name in PLACE), strict=True)
            columns["advantages"] = pa.array([advantages.get(place) for place in places], pa.list_(pa.float32()))
        columns |= group_columns(table, scores, auxiliary, terms=terms, informative=informative)
        for name, column in columns.items():
            table = table.append_column(name, column)
        table = table.add_column(0, "iteration", pa.array([number] * table.num_rows, pa.int32()))
        yield table.add_column(0, "run", pa.array([run.name] * table.num_rows, pa.string()))


def _read_scores(run: Run, rollouts: Manifest, prefix: str) -> pa.Table:
    scored = run.find(StageKey.parse(rollouts.key).with_stage("scoring").with_prefix(prefix))
    assert scored is not None, "a sealed iteration has scores for every rollout shard"
    return read_shard(run.store, scored.shards[0])


def _read_advantages(iteration: Iteration) -> dict[Place, np.ndarray]:
    """Return the advantages that the update trained on, by prompt row and sample number. The samples of an episode are
    concatenated in order."""
    advantages: dict[Place, list[np.ndarray]] = {}
    for shard in iteration.credit.shards:
        samples = read_shard(iteration.run.store, shard, [*PLACE, "advantages"])
        places = zip(*(samples[name].to_pylist() for name in PLACE), strict=True)
        for place, advantages_T in zip(places, row_arrays(samples["advantages"], np.float32), strict=True):
            advantages.setdefault(place, []).append(advantages_T)
    return {place: np.concatenate(parts) for place, parts in advantages.items()}


def _informative_rule(
    run: Run, derived: DerivedResult | None
) -> tuple[Callable[[ScoredGroups], Mask] | None, tuple[TermColumns, ...]]:
    """Return the function of the run's algorithm that decides which groups train the policy, and the reward terms in
    the scores.

    The function is None for an algorithm defined in user code, because reading a run must not import code that the run
    names.
    """
    config = run.record.config
    rescoring = None if derived is None else rescoring_terms(run, derived.name)
    scoring = read_recorded(ScoringConfig, config["scoring"]) if rescoring is None else rescoring.scoring
    dynamic = read_recorded(RolloutConfig, config["rollout"]).dynamic
    terms, recorded_algorithm = term_columns(scoring), config["algorithm"]
    if isinstance(recorded_algorithm, dict) and recorded_algorithm["kind"] == "target":
        return None, terms
    algorithm = TypeAdapter[Algorithm](AlgorithmConfig).validate_python(recorded_algorithm, context=RECORDED)
    if dynamic is None or rescoring is not None:
        return partial(informative_groups, algorithm=algorithm), terms
    return partial(informative_by, algorithm=algorithm, metric=dynamic.metric or terms[0].name), terms


def write_export(tables: Iterable[pa.Table], path: Path, *, key: str) -> None:
    """Write tables to one Parquet file, one at a time, so that they need not fit in memory together. Raises BadInput if
    there is no table or the columns differ."""
    remaining = iter(tables)
    first = next(remaining, None)
    if first is None:
        raise BadInput(
            f"There is nothing to export as {key!r}, because no iteration of the run contains this data. Choose "
            "another table."
        )
    schema = first.schema.remove_metadata()  # the metadata of a shard describes that shard only
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        writer.write_table(first.cast(schema))
        for table in remaining:
            if not table.schema.equals(schema):
                raise BadInput(
                    f"All tables of {key!r} must have the same columns, {schema.names}, but one has "
                    f"{table.schema.names}. Export the iterations separately."
                )
            writer.write_table(table.cast(schema))
