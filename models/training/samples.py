"""Reading training samples: an index of lengths for the plan, and the rows that a rank was given.

Shapes: T completion tokens of all samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from infra.errors import Damaged
from infra.store.shards import ShardRef, read_shard
from infra.store.storage import Store
from models.modeling.batching import TrainingSample
from models.records.columns import row_arrays
from models.records.model_input import sample_inputs, sample_lengths
from models.records.schemas import SAMPLE_SCHEMA


@dataclass(frozen=True, slots=True)
class TrainingSamples:
    """Training samples, mapped from the store; every row of the shards in their order."""

    table: pa.Table
    groups: tuple[int, ...]
    """Prompt row of each sample."""
    lengths: tuple[int, ...]
    """Tokens of each sample, prompt and completion."""
    completion_lengths: tuple[int, ...]


def open_samples(store: Store, shards: Sequence[ShardRef]) -> TrainingSamples:
    """Open verified shards and check that every row's columns agree in length; a critic has seen all rows or none."""
    tables = [read_shard(store, shard, SAMPLE_SCHEMA.names).replace_schema_metadata(None) for shard in shards]
    table = pa.concat_tables(tables) if tables else SAMPLE_SCHEMA.empty_table()
    lengths, prompts = sample_lengths(table)
    completions = lengths - prompts
    critic = table["returns"].null_count < table.num_rows
    for column in ("logprobs", "advantages", "staleness", *(("values", "returns") if critic else ())):
        wrong = np.flatnonzero((_lengths(table, column) != completions) | (prompts < 1) | (completions < 0))
        if len(wrong):
            row = int(wrong[0])
            raise Damaged(
                f"sample {row}: {lengths[row]} tokens of which {prompts[row]} are the prompt's: expected at least one "
                f"and one of {column} per completion token, found {max(0, _lengths(table, column)[row])}"
            )
    return TrainingSamples(
        table=table,
        groups=tuple(table["prompt_row"].to_pylist()),
        lengths=tuple(lengths.tolist()),
        completion_lengths=tuple(completions.tolist()),
    )


def weighted_lengths(samples: TrainingSamples, max_staleness: int | None) -> tuple[int, ...]:
    """Completion tokens of each sample that have a weight in the loss: those that are not too stale."""
    if max_staleness is None:
        return samples.completion_lengths
    rows_T = np.repeat(np.arange(len(samples.lengths)), samples.completion_lengths)
    recent_T = pc.list_flatten(samples.table["staleness"]).to_numpy() <= max_staleness
    return tuple(np.bincount(rows_T[recent_T], minlength=len(samples.lengths)).tolist())


def read_training_rows(samples: TrainingSamples, rows: Sequence[int]) -> dict[int, TrainingSample]:
    """Read the given rows alone."""
    if not rows:
        return {}
    taken = samples.table.take(pa.array(rows, pa.int64())).combine_chunks()
    inputs, staleness = sample_inputs(taken), row_arrays(taken["staleness"], np.int16)
    logprobs, advantages = (row_arrays(taken[name], np.float32) for name in ("logprobs", "advantages"))
    values, returns = (_rows_if_known(taken, name) for name in ("values", "returns"))
    return {
        row: TrainingSample(
            input=inputs[index],
            logprobs=logprobs[index],
            advantages=advantages[index],
            staleness=staleness[index],
            values=values[index],
            returns=returns[index],
        )
        for index, row in enumerate(rows)
    }


def _lengths(table: pa.Table, column: str) -> NDArray[np.int64]:
    """Length of each row's list; -1 where it is null."""
    lengths: NDArray[np.int64] = pc.fill_null(pc.list_value_length(table[column]), -1).to_numpy().astype(np.int64)
    return lengths


def _rows_if_known(table: pa.Table, column: str) -> Sequence[NDArray[np.float32] | None]:
    return [None] * table.num_rows if table[column].null_count else row_arrays(table[column], np.float32)
