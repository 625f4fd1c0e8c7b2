"""Computation of per-token outputs of auxiliary models (reference, critic, teacher) for scored rollouts.

All models read the same micro-batches. Shapes: N policy-generated tokens of one micro-batch, T completion tokens, W
policy-generated tokens among the T.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter
from torch import Tensor

from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput
from rheostat.infra.store.bundles import fetch_bundle
from rheostat.infra.store.contracts import Store
from rheostat.infra.store.shards import ShardRef, read_shard, write_shard
from rheostat.models.config.algorithms import Algorithm
from rheostat.models.config.teachers import Distillation, TeacherEndpoint
from rheostat.models.endpoints.prompt_logprobs import TokenScorer
from rheostat.models.modeling.batching import Rows, Sequences, plan_step
from rheostat.models.modeling.layout import AuxiliaryForward, MicroBatch, lay_out
from rheostat.models.records.columns import Integers, Mask, concatenate_tables, large_lists, lists, select_rows
from rheostat.models.records.model_input import (
    ROLLOUT_INPUT,
    ModelInput,
    completion_lengths,
    generated_tokens_mask,
    rollout_inputs,
    select_with_optional,
)
from rheostat.models.records.schemas import ESTIMATE_SCHEMA, TOP_IDS, TOP_LOGPROBS
from rheostat.models.records.turn_prompts import split_at_prompts
from rheostat.models.records.work import EstimateWork
from rheostat.models.text.alignment import Span, spread_differences
from rheostat.models.text.tokenizer import build_token_decoder, load_tokenizer
from rheostat.models.training.ranks import Ranks, broadcast_bytes, gather_bytes
from rheostat.models.training.trainer import Forward
from rheostat.models.training.versions import LoadedModels
from rheostat.models.vision.families import ImageTokens

_COLUMNS = ("prompt_row", "sample", *ROLLOUT_INPUT)

_REFS = TypeAdapter(tuple[ShardRef, ...])


@dataclass(frozen=True, slots=True)
class TeacherSequence:
    """Sequence that a teacher reads instead of the policy's sequence."""

    input: ModelInput
    spans: tuple[Span, ...] | None = None
    """Parts of the completion that are compared, or None if the completion consists of the policy's tokens."""


@dataclass(frozen=True, slots=True)
class AuxiliaryModels:
    """Auxiliary models (reference, critic, teachers) of one work unit, which are loaded when they are needed."""

    load: Callable[[int], Mapping[str, AuxiliaryForward]]
    """Function that loads the models, with the teacher of this index, and returns their forward functions by output
    column. It returns the same columns for every teacher."""
    choose_teacher: Callable[[int], int]
    """Function that returns the index of the teacher for the prompt with this row number."""
    top_k: int = 0
    """Number of most probable tokens that teachers return in addition to the log-prob of each token."""
    build_teacher_inputs: Callable[[int, Rows, pa.Table, Sequence[ModelInput]], Mapping[int, TeacherSequence]] = (
        lambda teacher, rows, table, inputs: {}
    )
    """Function that returns the sequences that the teacher of an index reads instead of the policy's, by row. Its
    arguments are the index, the rows of the teacher, and the rollout table with its model inputs. A row that is not in
    the result has the policy's sequence."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Score shards with the per-token outputs of auxiliary models (reference, critic, teacher) for one iteration, and
    the number of scored sequences and tokens."""

    shards: tuple[ShardRef, ...]
    sequences: int
    tokens: int


def build_model_forward(forward: Callable[[MicroBatch], Tensor], on_progress: Callable[[], None]) -> AuxiliaryForward:
    """Return a function that runs a loaded auxiliary model over micro-batches and returns one array per micro-batch,
    with one value per policy-generated token, or several if the model returns its most probable tokens. `on_progress`
    is called after every forward pass."""

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


def load_auxiliary_models(
    store: Store,
    work: EstimateWork,
    models: LoadedModels,
    algorithm: Algorithm,
    *,
    teacher: int,
    on_progress: Callable[[], None],
) -> dict[str, AuxiliaryForward]:
    """Load the auxiliary models of the work, with the teacher of index `teacher` in `Distillation.teachers`. Return
    their forward functions by output column. Collective under ZeRO-3: every rank must call this."""
    forwards, distillation = dict[str, Forward](), algorithm.distillation
    if distillation is not None or (work.reference is not None and models.is_base(work.reference, work.policy)):
        actor = models.policy.load_for_inference(work.policy)
        forwards |= {} if distillation is None else {"policy": actor.forward}
    if work.reference is not None:
        forwards["reference"] = models.reference(work.reference, policy=work.policy)
    if work.critic is not None:
        forwards["values"] = models.critic.load_for_inference(work.critic).forward
    loaded = {column: build_model_forward(forward, on_progress) for column, forward in forwards.items()}
    if distillation is None:
        return loaded
    endpoint = [*distillation.teachers.values()][teacher].endpoint
    version = (work.teacher, *work.specialists)[teacher]
    if endpoint is not None:
        where, is_querying = fetch_bundle(store, work.policy.weights), models.ranks.reports_metrics
        forward = build_endpoint_forward(endpoint, directory=where, on_progress=on_progress, is_querying=is_querying)
    elif version is not None:
        forward = build_model_forward(models.teacher(version), on_progress)
    elif [*distillation.teachers.values()][teacher].privileged is not None:
        forward = build_model_forward(models.policy_as_teacher(), on_progress)
    else:
        raise BadInput(f"iteration {work.iteration}: the work unit does not name the teacher's weights")
    return {**loaded, "teacher": forward}


def choose_teachers(store: Store, work: EstimateWork, settings: Distillation | None) -> Callable[[int], int]:
    """Return the function that returns the index in `Distillation.teachers` of the teacher for a prompt, given the row
    number of the prompt. Raises BadInput if there are specialists, but the work unit does not name the prompts."""
    if settings is None or not settings.specialists:
        return lambda prompt_row: 0
    if work.prompts is None or len(work.specialists) != len(settings.specialists):
        raise BadInput(
            f"iteration {work.iteration}: the work unit must name the prompts and "
            f"{format_count(len(settings.specialists), 'specialist')} of algorithm.distillation, but it does not"
        )
    columns = read_shard(store, work.prompts, ["columns"])["columns"]
    return cache(lambda prompt_row: settings.choose_teacher(json.loads(columns[prompt_row].as_py())))


def write_auxiliary_scores(
    store: Store,
    work: EstimateWork,
    models: AuxiliaryModels,
    *,
    microbatch_tokens: int,
    ranks: Ranks,
    images: ImageTokens | None,
    step_tokens: int | None = None,
) -> TokenScores:
    """Run the auxiliary models on all completion tokens, and write one shard of outputs per rollout shard. Collective:
    every rank must call this, and rank 0 writes the shards.

    The completions of each teacher form separate micro-batches, which all models read, except a teacher with sequences
    of its own. A teacher without completions is not loaded. `images` is None unless a vision tower encodes the images
    of every micro-batch again. `step_tokens` is the number of tokens that a text-to-image policy reads per denoising
    step, and None for other policies.
    """
    tables = [
        select_rows(select_with_optional(read_shard(store, shard.rollouts), _COLUMNS), shard.rows)
        for shard in work.shards
    ]
    table = concatenate_tables(tables).combine_chunks()
    completions, is_trained_T = completion_lengths(table), generated_tokens_mask(table)
    prompt_table, _ = split_at_prompts(table)
    inputs = rollout_inputs(prompt_table)
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
    outputs, sequences_read = _Outputs(ranks, microbatch_tokens), dict[int, TeacherSequence]()
    for teacher, rows in _split_rows(sequences.groups, models.choose_teacher).items():
        forwards, other = models.load(teacher), models.build_teacher_inputs(teacher, rows, prompt_table, inputs)
        rest = tuple(row for row in rows if row not in other)
        if rest or not other:
            outputs.compute(forwards, rest, inputs, sequences)
        if other:
            own = [other[row].input if row in other else each for row, each in enumerate(inputs)]
            mine, sequences_read = tuple(sorted(other)), {**sequences_read, **other}
            others = {name: forward for name, forward in forwards.items() if name != "teacher"}
            outputs.compute(others, mine, inputs, sequences)
            outputs.compute({"teacher": forwards["teacher"]}, mine, own, _replace_sizes(sequences, own))
    encoded = b""
    if ranks.rank == 0:
        counts = np.array([len(each.trained_positions) for each in inputs], np.int64)
        width = 1 + 2 * models.top_k
        teacher_counts = counts.copy()
        for row, each in sequences_read.items():
            teacher_counts[row] = len(each.input.trained_positions)
        ordered = {
            name: _restore_order(parts, outputs.orders[name], teacher_counts * width if name == "teacher" else counts)
            for name, parts in outputs.values.items()
        }
        if any(each.spans is not None for each in sequences_read.values()):
            ordered["teacher"] = _align_teacher(ordered, counts, teacher_counts, sequences_read)
        top_columns = dict[str, pa.LargeListArray]()
        if models.top_k:
            values_WM = ordered["teacher"].reshape(-1, width)
            ordered["teacher"] = np.ascontiguousarray(values_WM[:, 0])
            top_columns = _split_top_columns(values_WM[:, 1:], is_trained_T, completions)
        columns = top_columns | {
            name: lists(_spread_over_tokens(values_W, is_trained_T), completions) for name, values_W in ordered.items()
        }
        encoded = _REFS.dump_json(_write_shards(store, work, tables, columns))
    shards = _REFS.validate_json(broadcast_bytes(encoded, ranks))
    return TokenScores(shards=shards, sequences=len(inputs), tokens=int(is_trained_T.sum()))


@dataclass(frozen=True, slots=True)
class _Outputs:
    """Outputs of the auxiliary models by output column, in the order in which they were computed."""

    ranks: Ranks
    microbatch_tokens: int
    """Maximum number of padded tokens in a micro-batch."""
    values: defaultdict[str, list[NDArray[np.float32]]] = field(default_factory=lambda: defaultdict(list))
    """Outputs of all ranks. Each array contains those of one rank."""
    orders: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Rows in the order of `values`."""

    def compute(
        self,
        forwards: Mapping[str, AuxiliaryForward],
        rows: Rows,
        inputs: Sequence[ModelInput],
        sequences: Sequences,
    ) -> None:
        """Run models on these rows of the inputs, whose sizes are `sequences`. Collective: every rank must call
        this."""
        ranks = self.ranks
        plan = plan_step(rows, sequences, ranks=ranks.data_parallel_size, microbatch_tokens=self.microbatch_tokens)
        microbatches = [lay_out([inputs[row] for row in part]) for part in plan.microbatches[ranks.data_parallel_rank]]
        for name, forward in forwards.items():
            values = np.concatenate([np.zeros(0, np.float32), *(each.ravel() for each in forward(microbatches))])
            gathered = gather_bytes(values.tobytes() if ranks.reports_metrics else b"", ranks)
            self.values[name] += [np.frombuffer(data, np.float32) for data in gathered]
            self.orders[name] += [row for parts in plan.microbatches for part in parts for row in part]


def _replace_sizes(sequences: Sequences, inputs: Sequence[ModelInput]) -> Sequences:
    """Return the sizes of other inputs with the same completions and no images."""
    return replace(
        sequences, lengths=[len(each) for each in inputs], prompts=[each.num_prompt_tokens for each in inputs]
    )


def _align_teacher(
    values: Mapping[str, NDArray[np.float32]],
    counts: NDArray[np.int64],
    teacher_counts: NDArray[np.int64],
    sequences: Mapping[int, TeacherSequence],
) -> NDArray[np.float32]:
    """Return the teacher's log-probs for the policy's tokens (W), given the outputs of policy and teacher with their
    numbers of tokens in each row."""
    policy, teacher = (
        np.split(values[name], np.cumsum(lengths)[:-1])
        for name, lengths in (("policy", counts), ("teacher", teacher_counts))
    )
    for row, each in sequences.items():
        if each.spans is not None:
            teacher[row] = spread_differences(policy[row], teacher[row], each.spans)
    return np.concatenate(teacher)


def _split_rows(prompt_rows: Sequence[int], choose_teacher: Callable[[int], int]) -> dict[int, Rows]:
    """Return the row numbers of the completions of each teacher, by the teacher's index in ascending order. Without
    completions, the first teacher gets no rows."""
    teachers = [choose_teacher(prompt_row) for prompt_row in prompt_rows]
    return {
        teacher: tuple(row for row, each in enumerate(teachers) if each == teacher)
        for teacher in sorted({*teachers}) or [0]
    }


def _restore_order(
    parts: Sequence[NDArray[np.float32]], order: Sequence[int], counts: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return the outputs of one model in the order of the rows (W). `parts` contains the outputs of all ranks, `order`
    the rows in the order in which they were computed, and `counts` the number of policy-generated tokens of each
    row."""
    rows = np.array(order, np.int64)
    values: NDArray[np.float32] = (
        large_lists(np.concatenate(parts), counts[rows]).take(pa.array(np.argsort(rows))).flatten().to_numpy()
    )
    return values


def _split_top_columns(
    values_WM: NDArray[np.float32], is_trained_T: Mask, completions: Integers
) -> dict[str, pa.LargeListArray]:
    """Return the columns of the teacher's k most probable tokens. The rows of `values_WM` contain the k log-probs, then
    the k token IDs as floats, which are exact below 2**24. `completions` is the number of tokens of each completion."""
    logprobs_WK, ids_WK = np.split(values_WM, 2, axis=1)
    rows_T = np.repeat(np.arange(len(completions)), completions)
    lengths = np.bincount(rows_T[is_trained_T], minlength=len(completions)) * logprobs_WK.shape[1]
    ids = large_lists(ids_WK.astype(np.int32).ravel(), lengths)
    return {TOP_IDS: ids, TOP_LOGPROBS: large_lists(logprobs_WK.ravel(), lengths)}


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
        optional = [pa.field(name, columns[name].type) for name in (TOP_IDS, TOP_LOGPROBS) if name in columns]
        schema = pa.schema([*ESTIMATE_SCHEMA, *optional])
        batch_table = pa.table(names | estimates | absent).select(schema.names).cast(schema)
        metadata = {"iteration": str(work.iteration), "rollouts": shard.rollouts.digest}
        refs.append(write_shard(store, batch_table, kind="estimates", metadata=metadata))
        begin += table.num_rows
    return tuple(refs)
