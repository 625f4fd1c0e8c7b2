"""Training samples of an iteration: the lengths of all samples, for planning, and the rows that one rank reads.

Shapes: T completion tokens of all samples, K rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput, Damaged
from rheostat.infra.store.contracts import Store
from rheostat.infra.store.shards import ShardRef, read_shard
from rheostat.models.modeling.batching import Sequences
from rheostat.models.modeling.layout import TrainingSample
from rheostat.models.records.columns import Integers, Mask, concatenate_tables, flat, lengths_of, lists, row_arrays
from rheostat.models.records.model_input import (
    ModelInput,
    attach_experts,
    sample_inputs,
    sample_lengths,
    select_with_optional,
    trained_tokens_mask,
)
from rheostat.models.records.schemas import PER_TOKEN, SAMPLE_SCHEMA, TERM_REWARD, TOP_IDS, TOP_LOGPROBS
from rheostat.models.vision.families import ImageTokens


@dataclass(frozen=True, slots=True)
class TrainingSamples:
    """Memory-mapped training samples of an iteration, in the order of the shards. A row is one sample."""

    table: pa.Table
    groups: tuple[int, ...]
    """Index of each sample's prompt in the prompt shard. Samples of the same prompt form a group."""
    completions: tuple[tuple[int, int], ...]
    """Pair (prompt index, completion number within the group) for each sample. An episode whose turns have separate
    prompts has one sample per turn, all with the same pair."""
    lengths: tuple[int, ...]
    """Number of prompt and completion tokens of each sample."""
    prompt_lengths: tuple[int, ...]
    trained_lengths: tuple[int, ...]
    """Number of completion tokens of each sample that a policy generated and that are trained on."""

    @property
    def is_fresh(self) -> bool:
        """Whether the newest policy generated every token that is trained on."""
        return not flat(self.table["staleness"])[trained_tokens_mask(self.table)].any()

    def sequences(self, images: ImageTokens | None, *, step_tokens: int | None = None) -> Sequences:
        """Return the sizes of all samples, from which optimizer steps are planned. `images` is given if the vision
        tower encodes the images again in every micro-batch. `step_tokens` is given only for text-to-image policies: the
        number of tokens that their denoiser reads for one denoising step."""
        if step_tokens is not None:
            return Sequences.for_images(self.trained_lengths, self.groups, step_tokens=step_tokens)
        patches = (0,) * len(self.lengths)
        if images is not None:  # the policy never generates an image placeholder token
            are_images_T = flat(self.table["tokens"]) == images.token
            patches = tuple(
                images.merges * count for count in _count_per_row(are_images_T, np.array(self.lengths, np.int64))
            )
        return Sequences(lengths=self.lengths, prompts=self.prompt_lengths, groups=self.groups, patches=patches)


def open_samples(store: Store, shards: Sequence[ShardRef]) -> TrainingSamples:
    """Open shards of training samples and verify their contents. Raises Damaged if the columns of a row differ in
    length, if a prompt is empty, or if only some rows have values of a critic."""
    tables = [select_with_optional(read_shard(store, shard), SAMPLE_SCHEMA.names) for shard in shards]
    table = concatenate_tables(tables) if tables else SAMPLE_SCHEMA.empty_table()
    lengths, prompts = sample_lengths(table)
    completions = lengths - prompts
    critic = table["returns"].null_count < table.num_rows
    for column in ("logprobs", "advantages", "staleness", *(("values", "returns") if critic else ())):
        damaged_rows = np.flatnonzero((_list_lengths(table, column) != completions) | (prompts < 1) | (completions < 0))
        if len(damaged_rows):
            row = int(damaged_rows[0])
            raise Damaged(
                f"row {row} of the sample shards has {format_count(lengths[row], 'token')}, of which {prompts[row]} "
                f"belong to the prompt. A prompt needs at least one token, and the column {column} needs one value per "
                f"completion token, but it has {max(0, _list_lengths(table, column)[row])}. Restore the shard from a "
                "copy of the run"
            )
    return TrainingSamples(
        table=table,
        groups=tuple(table["prompt_row"].to_pylist()),
        completions=tuple(zip(table["prompt_row"].to_pylist(), table["sample"].to_pylist(), strict=True)),
        lengths=tuple(lengths.tolist()),
        prompt_lengths=tuple(prompts.tolist()),
        trained_lengths=_count_per_row(trained_tokens_mask(table), completions),
    )


def weighted_lengths(samples: TrainingSamples, max_staleness: int | None) -> tuple[int, ...]:
    """Return, for each sample, the number of completion tokens that have a nonzero loss weight and are not too stale. A
    token is too stale if its policy version is more than `max_staleness` versions old. None means no limit."""
    if max_staleness is None:
        return samples.trained_lengths
    recent_T = flat(samples.table["staleness"]) <= max_staleness
    return _count_per_row(trained_tokens_mask(samples.table) & recent_T, lengths_of(samples.table["staleness"]))


def find_correct(samples: TrainingSamples, min_reward: float) -> Mask:
    """Return a mask of the samples (K) whose completion has a score of at least `min_reward` in the reward term that is
    stored with the samples. Raises BadInput if no scores are stored."""
    if TERM_REWARD not in samples.table.column_names:
        raise BadInput(
            "update.positive_nll needs the scores of the completions, but the training samples of this iteration were "
            "computed without this setting. Remove the setting for this iteration, or compute the samples again"
        )
    correct_K: Mask = pc.fill_null(pc.greater_equal(samples.table[TERM_REWARD], min_reward), False).to_numpy()
    return correct_K


def require_top_tokens(samples: TrainingSamples) -> None:
    """Raise BadInput if the teacher's most probable tokens are not stored with the samples."""
    if samples.table.num_rows and TOP_IDS not in samples.table.column_names:
        raise BadInput(
            "algorithm.distillation.top_k needs the teacher's most probable tokens, but the training samples of this "
            "iteration were computed without this setting. Remove the setting for this iteration, or compute the "
            "samples again"
        )


def stale_shares(samples: TrainingSamples, max_staleness: int | None) -> dict[str, float]:
    """Return two metrics: the share of trained tokens that an earlier policy generated, and the share that is more than
    `max_staleness` versions old."""
    ages_T = flat(samples.table["staleness"])[trained_tokens_mask(samples.table)]
    too_stale = 0.0 if max_staleness is None else float((ages_T > max_staleness).mean())
    return {"stale_fraction": float((ages_T > 0).mean()), "too_stale_fraction": too_stale}


def _count_per_row(among_T: Mask, lengths_K: Integers) -> tuple[int, ...]:
    """Count the completion tokens of each sample that the mask `among_T` selects. `lengths_K` is the number of
    completion tokens of each sample."""
    rows_T = np.repeat(np.arange(len(lengths_K)), lengths_K)
    return tuple(np.bincount(rows_T[among_T], minlength=len(lengths_K)).tolist())


def read_training_rows(samples: TrainingSamples, rows: Sequence[int]) -> dict[int, TrainingSample]:
    """Read the samples with the given row numbers and return them by row number. Other rows are not loaded."""
    if not rows:
        return {}
    selected = samples.table.select(SAMPLE_SCHEMA.names).take(pa.array(rows, pa.int64())).combine_chunks()
    inputs, selected = attach_experts(sample_inputs(selected), samples.table, rows), _keep_trained_tokens(selected)
    staleness = row_arrays(selected["staleness"], np.int16)
    logprobs, advantages = (row_arrays(selected[name], np.float32) for name in ("logprobs", "advantages"))
    values, returns = (_read_optional_rows(selected, name) for name in ("values", "returns"))
    top_ids, top_logprobs = _read_top_rows(samples.table, rows, inputs)
    return {
        row: TrainingSample(
            input=inputs[index],
            logprobs=logprobs[index],
            advantages=advantages[index],
            staleness=staleness[index],
            values=values[index],
            returns=returns[index],
            top_ids=top_ids[index],
            top_logprobs=top_logprobs[index],
        )
        for index, row in enumerate(rows)
    }


def _read_top_rows(
    table: pa.Table, rows: Sequence[int], inputs: Sequence[ModelInput]
) -> tuple[Sequence[NDArray[np.int32] | None], Sequence[NDArray[np.float32] | None]]:
    """Return the IDs and log-probs of the teacher's k most probable tokens for each row (tokens x k), or None for each
    row if they were not stored. Raises Damaged if a row does not have the same number for each trained token."""
    if TOP_IDS not in table.column_names:
        return [None] * len(rows), [None] * len(rows)
    selected = table.select([TOP_IDS, TOP_LOGPROBS]).take(pa.array(rows, pa.int64())).combine_chunks()
    ids, logprobs = row_arrays(selected[TOP_IDS], np.int32), row_arrays(selected[TOP_LOGPROBS], np.float32)
    counts = [len(each.trained_positions) for each in inputs]
    total = sum(counts)
    width = sum(map(len, ids)) // total if total else 0
    expected = [count * width for count in counts]
    if [*map(len, ids)] != expected or [*map(len, logprobs)] != expected:
        raise Damaged(
            "the sample shards must have the same number of the teacher's most probable tokens for each trained token, "
            "but they do not. Restore the shard from a copy of the run"
        )
    shapes = [(count, width) for count in counts]
    return (
        [each.reshape(shape) for each, shape in zip(ids, shapes, strict=True)],
        [each.reshape(shape) for each, shape in zip(logprobs, shapes, strict=True)],
    )


def _keep_trained_tokens(table: pa.Table) -> pa.Table:
    """Remove the values of tokens that no policy generated from the columns with one value per completion token."""
    learnt_T, lengths_K = trained_tokens_mask(table), lengths_of(table["staleness"])
    if learnt_T.all():
        return table
    counts_K = np.array(_count_per_row(learnt_T, lengths_K), np.int64)
    for name in PER_TOKEN:
        if table[name].null_count == 0:
            column = pa.chunked_array([lists(flat(table[name])[learnt_T], counts_K)])
            table = table.set_column(table.schema.get_field_index(name), name, column)
    return table


def _list_lengths(table: pa.Table, column: str) -> NDArray[np.int64]:
    """Return the length of the list in each row of a column, or -1 if the list is null."""
    lengths: NDArray[np.int64] = pc.fill_null(pc.list_value_length(table[column]), -1).to_numpy().astype(np.int64)
    return lengths


def _read_optional_rows(table: pa.Table, column: str) -> Sequence[NDArray[np.float32] | None]:
    return [None] * table.num_rows if table[column].null_count else row_arrays(table[column], np.float32)
