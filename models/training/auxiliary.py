"""Computation of per-token outputs of auxiliary models (reference, critic, teacher) for scored rollouts.

All models read the same micro-batches. Shapes: N policy-generated tokens of one micro-batch, T completion tokens, W
policy-generated tokens among the T, C columns.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter
from torch import Tensor

from rheostat.infra.store.contracts import Store
from rheostat.infra.store.shards import ShardRef, read_shard, write_shard
from rheostat.models.config.teachers import TeacherEndpoint
from rheostat.models.endpoints.prompt_logprobs import TokenScorer
from rheostat.models.modeling.batching import Sequences, StepPlan, plan_step
from rheostat.models.modeling.layout import AuxiliaryForward, MicroBatch, lay_out
from rheostat.models.records.columns import Mask, concatenate_tables, lists, select_rows
from rheostat.models.records.model_input import (
    ROLLOUT_INPUT,
    completion_lengths,
    generated_tokens_mask,
    rollout_inputs,
    select_with_experts,
)
from rheostat.models.records.schemas import ESTIMATE_SCHEMA
from rheostat.models.records.turn_prompts import split_at_prompts
from rheostat.models.records.work import EstimateWork
from rheostat.models.text.tokenizer import build_token_decoder, load_tokenizer
from rheostat.models.training.ranks import Ranks, broadcast_bytes, gather_bytes
from rheostat.models.vision.families import ImageTokens

_COLUMNS = ("prompt_row", "sample", *ROLLOUT_INPUT)

_REFS = TypeAdapter(tuple[ShardRef, ...])


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Score shards with the per-token outputs of auxiliary models (reference, critic, teacher) for one iteration, and
    the number of scored sequences and tokens."""

    shards: tuple[ShardRef, ...]
    sequences: int
    tokens: int


def build_model_forward(forward: Callable[[MicroBatch], Tensor], on_progress: Callable[[], None]) -> AuxiliaryForward:
    """Return a function that runs a loaded auxiliary model over micro-batches and returns one array per micro-batch,
    with one value per policy-generated token. `on_progress` is called after every forward pass."""

    @torch.no_grad()
    def ask(microbatches: Sequence[MicroBatch]) -> list[NDArray[np.float32]]:
        outputs: list[NDArray[np.float32]] = []
        for batch in microbatches:
            outputs.append(forward(batch).float().cpu().numpy())
            on_progress()
        return outputs

    return ask


def build_endpoint_forward(
    teacher: TeacherEndpoint, *, directory: Path, on_progress: Callable[[], None], is_querying: bool = True
) -> AuxiliaryForward:
    """Return a function that requests the log-probs of each sequence from a teacher's endpoint, at temperature 1.
    `directory` contains the policy's tokenizer. `on_progress` is called after every attempt. The returned function
    raises EndpointDown if the endpoint does not answer, and WorkerFailed if its answer is invalid.

    In a sequence-parallel group only the rank with `is_querying` queries the endpoint, and the other ranks return an
    empty list.
    """
    scorer = TokenScorer(teacher, spell=build_token_decoder(load_tokenizer(directory)), on_progress=on_progress)

    def ask(batches: Sequence[MicroBatch]) -> list[NDArray[np.float32]]:
        queries = [[each for each in batch.inputs if len(each.trained_positions)] for batch in batches if is_querying]
        scores = iter(scorer.score([each for part in queries for each in part]))
        return [np.concatenate([np.zeros(0, np.float32), *(next(scores) for _ in part)]) for part in queries]

    return ask


def write_auxiliary_scores(
    store: Store,
    work: EstimateWork,
    forwards: Mapping[str, AuxiliaryForward],
    *,
    microbatch_tokens: int,
    ranks: Ranks,
    images: ImageTokens | None,
    step_tokens: int | None = None,
) -> TokenScores:
    """Run each auxiliary model on all completion tokens, and write one shard of outputs per rollout shard. `forwards`
    maps each output column to its model. Collective: every rank must call this, and rank 0 writes the shards.

    `images` is None unless a vision tower encodes the images of every micro-batch again. `step_tokens` is the number of
    tokens that a text-to-image policy reads per denoising step, and None for other policies.
    """
    tables = [
        select_rows(select_with_experts(read_shard(store, shard.rollouts), _COLUMNS), shard.rows)
        for shard in work.shards
    ]
    table = concatenate_tables(tables).combine_chunks()
    completions, is_trained_T = completion_lengths(table), generated_tokens_mask(table)
    prompt_table, _ = split_at_prompts(table)
    inputs = rollout_inputs(prompt_table)
    rows = tuple(range(len(inputs)))
    sequences = Sequences(
        lengths=[len(each) for each in inputs],
        prompts=[each.num_prompt_tokens for each in inputs],
        groups=prompt_table["prompt_row"].to_pylist(),
        patches=[0 if images is None else images.patches(each.prompt) for each in inputs],
    )
    if step_tokens is not None:
        sequences = Sequences.for_images(
            [len(each.trained_positions) for each in inputs], sequences.groups, step_tokens=step_tokens
        )
    plan = plan_step(rows, sequences, ranks=ranks.data_parallel_size, microbatch_tokens=microbatch_tokens)
    microbatches = [lay_out([inputs[row] for row in part]) for part in plan.microbatches[ranks.data_parallel_rank]]
    outputs = [np.concatenate([np.zeros(0, np.float32), *forwards[name](microbatches)]) for name in forwards]
    gathered = gather_bytes(np.stack(outputs).tobytes() if outputs and ranks.reports_metrics else b"", ranks)
    encoded = b""
    if ranks.rank == 0:
        counts = np.array([len(each.trained_positions) for each in inputs], np.int64)
        columns = {
            name: lists(_spread_over_tokens(values_W, is_trained_T), completions)
            for name, values_W in zip(
                forwards, _restore_order(gathered, plan, counts, num_columns=len(outputs)), strict=True
            )
        }
        encoded = _REFS.dump_json(_write_shards(store, work, tables, columns))
    shards = _REFS.validate_json(broadcast_bytes(encoded, ranks))
    return TokenScores(shards=shards, sequences=len(rows), tokens=int(is_trained_T.sum()))


def _restore_order(
    gathered: Sequence[bytes], plan: StepPlan, counts: NDArray[np.int64], *, num_columns: int
) -> list[NDArray[np.float32]]:
    """Return the outputs of all ranks in the order of the rows, as one array per output column. `gathered` contains the
    bytes of each rank, `plan` the rows that each rank computed, and `counts` the number of policy-generated tokens of
    each row."""
    parts = [np.frombuffer(data, np.float32).reshape(num_columns, -1) for data in gathered]
    values_CW = np.concatenate(parts, axis=1)
    order = np.array(
        [row for microbatches in plan.microbatches for rows in microbatches for row in rows], dtype=np.int64
    )
    back = pa.array(np.argsort(order))
    return [lists(values_W, counts[order]).take(back).flatten().to_numpy() for values_W in values_CW]


def _spread_over_tokens(values_W: NDArray[np.float32], is_trained_T: Mask) -> NDArray[np.float32]:
    """Expand values of policy-generated tokens to all completion tokens, with 0 for tokens that no policy generated."""
    values_T = np.zeros(len(is_trained_T), np.float32)
    values_T[is_trained_T] = values_W
    return values_T


def _write_shards(
    store: Store, work: EstimateWork, tables: Sequence[pa.Table], columns: Mapping[str, pa.ListArray]
) -> tuple[ShardRef, ...]:
    refs: list[ShardRef] = []
    begin = 0
    for shard, table in zip(work.shards, tables, strict=True):
        names = {name: table[name] for name in ("prompt_row", "sample")}
        estimates = {name: column.slice(begin, table.num_rows) for name, column in columns.items()}
        absent = {
            name: pa.nulls(table.num_rows, ESTIMATE_SCHEMA.field(name).type)
            for name in ESTIMATE_SCHEMA.names
            if name not in names | estimates
        }
        batch_table = pa.table(names | estimates | absent).select(ESTIMATE_SCHEMA.names).cast(ESTIMATE_SCHEMA)
        metadata = {"iteration": str(work.iteration), "rollouts": shard.rollouts.digest}
        refs.append(write_shard(store, batch_table, kind="estimates", metadata=metadata))
        begin += table.num_rows
    return tuple(refs)
