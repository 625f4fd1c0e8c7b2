"""Model inputs: sequences of tokens and images, in the one form that engines, trainers and judges all use.

Only this module reads and writes the token columns of prompts, rollouts and samples. A token is trained (`is_trained`)
if a model generated it or is trained to generate it (a completion token). All other tokens are context, such as a
prompt or an observation. Shapes: K rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray

from rheostat.infra.errors import Damaged
from rheostat.models.records.columns import (
    Integers,
    Mask,
    concatenate_lists,
    empty_rows,
    flat,
    integers,
    lengths_of,
    lists,
    row_arrays,
)
from rheostat.models.records.schemas import EXPERTS, TERM_REWARD, TOP_IDS, TOP_LOGPROBS, experts_type

COMPLETION_TOKENS: Final = "completion_tokens"
ROLLOUT_INPUT: Final = ("prompt_tokens", COMPLETION_TOKENS, "images", "segments")
"""Columns of a rollout table from which the model inputs are read."""
_HALVES: Final = ROLLOUT_INPUT[:2]
ENVIRONMENT: Final = -1
"""Value that marks tokens of an environment: as the `policy_version` of their segment, and as their `staleness`."""
TURN_PROMPT: Final = -2
"""Value of `policy_version` that marks a segment as the separate prompt of a turn. Later tokens do not attend to tokens
before this segment."""

Tokens = NDArray[np.int32]
Experts = NDArray[np.unsignedinteger[Any]]
"""Experts that the routers of a mixture-of-experts model chose, as integers of 8 or 16 bits. One row per token, with
the choices of all routers, router after router."""


@dataclass(frozen=True, slots=True, eq=False)
class TextChunk:
    """Consecutive tokens of a model input that are either all trained on or all context."""

    tokens: Tokens
    is_trained: bool
    """Whether a model generated these tokens or is trained to generate them, so that their log-probs are computed.
    Otherwise the tokens are context, which the model only reads."""

    def __eq__(self, other: object) -> bool:
        """Return whether two chunks have equal tokens and the same kind. The default comparison would compare arrays
        element by element."""
        return (
            isinstance(other, TextChunk)
            and self.is_trained == other.is_trained
            and np.array_equal(self.tokens, other.tokens)
        )


@dataclass(frozen=True, slots=True)
class ModelInput:
    """Token sequence that a model reads: the prompt, followed by the completion so far, if any.

    The sequence is stored in chunks. The completion starts with the first chunk that is trained on. Observations of an
    environment inside the completion are context, like the prompt. No chunk is empty.
    """

    chunks: tuple[TextChunk, ...] = ()
    images: tuple[str, ...] = ()
    """Digests of the images in the prompt, in order. At the place of each image, the prompt contains the number of
    placeholder tokens that the model uses for the image."""
    experts: Experts | None = field(default=None, compare=False, repr=False)
    """Experts that the routers of a mixture-of-experts model chose during generation, for every token except the last.
    None if they were not recorded."""

    @classmethod
    def from_prompt(cls, tokens: ArrayLike, images: Sequence[str] = ()) -> Self:
        """Create an input that consists only of a prompt, with the digests of the prompt's images."""
        return cls(_build_chunk(tokens, is_trained=False), tuple(images))

    def append_completion(self, tokens: ArrayLike) -> Self:
        """Return a new input with the tokens of a completion appended, which are trained on. Recorded experts are
        dropped."""
        return type(self)(self.chunks + _build_chunk(tokens, is_trained=True), self.images)

    def append_observation(self, tokens: ArrayLike) -> Self:
        """Return a new input with an observation (message of an environment) appended, which is not trained on.
        Recorded experts are dropped."""
        return type(self)(self.chunks + _build_chunk(tokens, is_trained=False), self.images)

    def with_experts(self, experts: Experts) -> Self:
        """Return a copy of this input with the recorded choices of a mixture-of-experts model's routers. Appending
        tokens later drops them."""
        return replace(self, experts=experts)

    def __len__(self) -> int:
        """Return the number of tokens of all chunks."""
        return _count_tokens(self.chunks)

    def last_context(self) -> Self:
        """Return a new input that contains only the last chunk, which must be context. This is the prompt of the next
        turn if turns have separate prompts."""
        return type(self)(self.chunks[-1:], self.images)

    @property
    def tokens(self) -> Tokens:
        """IDs of all tokens of the sequence, context and completion."""
        return _concatenate_tokens(self.chunks)

    @property
    def prompt(self) -> Tokens:
        """IDs of the tokens before the first trained token."""
        return _concatenate_tokens(self.chunks[: self._begin])

    @property
    def completion(self) -> Tokens:
        """IDs of the tokens from the first trained token to the end, including observations between turns."""
        return _concatenate_tokens(self.chunks[self._begin :])

    @property
    def trained_positions(self) -> NDArray[np.int64]:
        """Indices of the tokens that are trained on. Models compute log-probs only for these tokens."""
        are_trained = [chunk.is_trained for chunk in self.chunks]
        return np.flatnonzero(np.repeat(np.array(are_trained, np.bool_), [len(chunk.tokens) for chunk in self.chunks]))

    @property
    def weights(self) -> NDArray[np.float32]:
        """Loss weight of each trained token.

        A turn usually consists of one chunk, whose tokens have weight 1. If a turn consists of several adjacent chunks,
        the weights still sum to the turn's number of tokens, but each chunk has an equal share of the sum.
        """
        parts: list[NDArray[np.float32]] = []
        for is_trained, turn in groupby(self.chunks, lambda chunk: chunk.is_trained):
            sizes = [len(part.tokens) for part in turn] if is_trained else []
            parts.extend(np.full(size, sum(sizes) / len(sizes) / size, np.float32) for size in sizes)
        return np.concatenate(parts) if parts else np.empty(0, np.float32)

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens before the first trained token."""
        return _count_tokens(self.chunks[: self._begin])

    @property
    def num_completion_tokens(self) -> int:
        """Number of tokens from the first trained token to the end."""
        return _count_tokens(self.chunks[self._begin :])

    @property
    def num_turn_tokens(self) -> int:
        """Number of tokens after the last context token, which is the current length of the last turn."""
        begin = max((index + 1 for index, each in enumerate(self.chunks) if not each.is_trained), default=0)
        return _count_tokens(self.chunks[begin:])

    @property
    def _begin(self) -> int:
        """Index of the first chunk of the completion, or the number of chunks if there is no completion."""
        for index, chunk in enumerate(self.chunks):
            if chunk.is_trained:
                return index
        return len(self.chunks)


def _build_chunk(tokens: ArrayLike, *, is_trained: bool) -> tuple[TextChunk, ...]:
    ids = np.asarray(tokens, np.int32)
    return (TextChunk(ids, is_trained),) if len(ids) else ()


def _count_tokens(chunks: Sequence[TextChunk]) -> int:
    return sum([len(chunk.tokens) for chunk in chunks])


def _concatenate_tokens(chunks: Sequence[TextChunk]) -> Tokens:
    return chunks[0].tokens if len(chunks) == 1 else _join_chunks([chunk.tokens for chunk in chunks])


def _join_chunks(parts: Sequence[Tokens]) -> Tokens:
    return np.concatenate([np.zeros(0, np.int32), *parts])


def prompt_inputs(prompts: pa.Table) -> list[ModelInput]:
    """Return the model input for each row of a prompt table."""
    return list(map(ModelInput.from_prompt, row_arrays(prompts["tokens"], np.int32), image_digests(prompts)))


def prompt_columns(inputs: Sequence[ModelInput]) -> dict[str, pa.Array]:
    """Encode model inputs that are prompts as columns of a prompt table."""
    return {"tokens": _build_column([each.tokens for each in inputs]), **_build_image_column(inputs)}


def rollout_inputs(rollouts: pa.Table) -> list[ModelInput]:
    """Return the model input for each row of a rollout table, including unfinished completions. Raises Damaged if the
    columns of a row contradict each other."""
    prompts, completions = (row_arrays(rollouts[name], np.int32) for name in _HALVES)
    inputs = _build_inputs(prompts, completions, image_digests(rollouts), is_trained_T=generated_tokens_mask(rollouts))
    return attach_experts(inputs, rollouts, range(rollouts.num_rows))


def rollout_columns(inputs: Sequence[ModelInput]) -> dict[str, pa.Array]:
    """Encode model inputs as columns of a rollout table."""
    parts = ([each.prompt for each in inputs], [each.completion for each in inputs])
    return (
        dict(zip(_HALVES, map(_build_column, parts), strict=True))
        | _build_image_column(inputs)
        | _build_expert_column(inputs)
    )


def generated_tokens_mask(rollouts: pa.Table) -> Mask:
    """Return a mask of the completion tokens in a rollout table that a policy generated (T). The tokens of all rows are
    concatenated."""
    tokens_S, versions_S = read_segments(rollouts)
    is_trained_T: Mask = np.repeat(versions_S >= 0, tokens_S)
    return is_trained_T


def read_segments(rollouts: pa.Table) -> tuple[Integers, Integers]:
    """Return the number of tokens and the policy version of each segment in a rollout table (S). The segments of all
    rows are concatenated.

    A segment is a run of completion tokens from the same policy version, or from the environment.
    """
    parts = pc.list_flatten(rollouts["segments"])
    return integers(pc.struct_field(parts, "tokens")), integers(pc.struct_field(parts, "policy_version"))


def trained_tokens_mask(samples: pa.Table) -> Mask:
    """Return a mask of the completion tokens in a sample table that are trained on (T). The tokens of all rows are
    concatenated."""
    learnt_T: Mask = flat(samples["staleness"]) != ENVIRONMENT
    return learnt_T


def completion_lengths(rollouts: pa.Table) -> Integers:
    """Return the number of completion tokens in each of the K rows of a rollout table."""
    return lengths_of(rollouts[COMPLETION_TOKENS])


def sample_columns(rollouts: pa.Table, *, emptied_K: Mask) -> dict[str, pa.Array]:
    """Convert the model inputs in a rollout table to columns of a sample table. Rows in the mask `emptied_K` keep only
    their prompt."""
    prompts, completions = (rollouts[name] for name in _HALVES)
    if emptied_K.any():
        completions = empty_rows(completions, emptied_K)
    counts = pa.array(lengths_of(prompts).astype(np.int32))
    tokens = concatenate_lists(prompts, completions)
    columns = {"tokens": tokens, "num_prompt_tokens": counts, "images": rollouts["images"]}
    if EXPERTS in rollouts.column_names:
        columns[EXPERTS] = _truncate_experts(rollouts[EXPERTS], lengths_of(pa.chunked_array([tokens])) - 1)
    return columns


def sample_lengths(samples: pa.Table) -> tuple[Integers, Integers]:
    """Return the number of all tokens and the number of prompt tokens in each row of a sample table, as two arrays
    (K)."""
    return lengths_of(samples["tokens"]), samples["num_prompt_tokens"].to_numpy().astype(np.int64)


def sample_inputs(samples: pa.Table) -> list[ModelInput]:
    """Return the model input for each row of a sample table. Recorded experts are not included; `attach_experts` adds
    them."""
    counts = samples["num_prompt_tokens"].to_pylist()
    rows = [*zip(row_arrays(samples["tokens"], np.int32), counts, strict=True)]
    prompts, completions = [tokens[:count] for tokens, count in rows], [tokens[count:] for tokens, count in rows]
    return _build_inputs(prompts, completions, image_digests(samples), is_trained_T=trained_tokens_mask(samples))


def select_with_optional(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Return a table that contains only these columns and, if there are any, the columns with recorded experts of a
    mixture-of-experts model, with a teacher's most probable tokens, and with the scores of a reward term."""
    optional = (EXPERTS, TOP_IDS, TOP_LOGPROBS, TERM_REWARD)
    return table.select([*columns, *(name for name in optional if name in table.column_names)])


def attach_experts(inputs: list[ModelInput], table: pa.Table, rows: Sequence[int]) -> list[ModelInput]:
    """Return model inputs with their recorded experts (of a mixture-of-experts model), if the table has them. `rows`
    contains the table row of each input.

    Raises Damaged if the number of tokens with experts does not match an input.
    """
    if EXPERTS not in table.column_names:
        return inputs
    recorded = _read_expert_rows(table[EXPERTS])
    for row, each in zip(rows, inputs, strict=True):
        if len(recorded[row]) != len(each) - 1:
            raise Damaged(
                f"row {row}: the recorded experts must be those of {len(each) - 1} tokens, but there are "
                f"{len(recorded[row])}. Restore the shard from a copy of the run"
            )
    return [each.with_experts(recorded[row]) for row, each in zip(rows, inputs, strict=True)]


def _read_expert_rows(column: pa.ChunkedArray) -> list[Experts]:
    """Return the recorded experts of each row as arrays that share memory with the column. A null row yields an array
    without tokens."""
    rows: list[Experts] = []
    for array in column.chunks:
        values: Experts = array.values.flatten().to_numpy().reshape(-1, array.type.value_type.list_size)
        rows += [values[begin:end] for begin, end in pairwise(array.offsets.to_pylist())]
    return rows


def expert_lists(experts_TF: Experts, lengths_K: Integers) -> pa.LargeListArray:
    """Convert recorded experts to a list column. `experts_TF` contains the experts of all rows' tokens, concatenated,
    and `lengths_K` the number of tokens of each row."""
    numbers = pa.array(experts_TF.ravel())
    kind = experts_type(numbers.type, experts_TF.shape[1])
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths_K))), pa.int64())
    values = pa.FixedSizeListArray.from_arrays(numbers, type=kind.value_type)
    return pa.LargeListArray.from_arrays(offsets, values, type=kind)


def zero_experts(column: pa.ChunkedArray, zeroed_K: Mask) -> pa.ChunkedArray:
    """Return the column of recorded experts with all experts in the rows marked by `zeroed_K` replaced by expert 0."""
    rows = zip(_read_expert_rows(column), zeroed_K, strict=True)
    arrays = [np.zeros_like(experts) if zeroed else experts for experts, zeroed in rows]
    return pa.chunked_array([expert_lists(np.concatenate(arrays), lengths_of(column))])


def _truncate_experts(column: pa.ChunkedArray, counts_K: Integers) -> pa.ChunkedArray:
    """Return the column of recorded experts, reduced in each row to the first `counts_K` tokens."""
    lengths_K = lengths_of(column)
    if np.array_equal(lengths_K, counts_K):
        return column
    arrays = [experts[:count] for experts, count in zip(_read_expert_rows(column), counts_K, strict=True)]
    return pa.chunked_array([expert_lists(np.concatenate(arrays), counts_K)])


def _build_inputs(
    prompts: Sequence[Tokens], completions: Sequence[Tokens], images: Sequence[tuple[str, ...]], *, is_trained_T: Mask
) -> list[ModelInput]:
    ends = np.cumsum([len(tokens) for tokens in completions])
    if len(is_trained_T) != (ends[-1] if len(ends) else 0):
        raise Damaged(
            f"completions with {ends[-1]} tokens in total need as many marks (whether the policy generated the "
            f"token), but there are {len(is_trained_T)}. Restore the shard from a copy of the run"
        )
    if is_trained_T.all():
        return list(map(_build_input, prompts, completions, images))
    masks = np.split(is_trained_T, ends[:-1])
    return [
        ModelInput(_build_chunk(prompt, is_trained=False) + _split_turns(completion, mask), image_digests)
        for prompt, completion, mask, image_digests in zip(prompts, completions, masks, images, strict=True)
    ]


def _split_turns(completion: Tokens, is_trained_T: Mask) -> tuple[TextChunk, ...]:
    """Split the tokens of a completion into chunks, at every change between trained tokens and context tokens."""
    cuts = np.flatnonzero(np.diff(is_trained_T)) + 1
    parts = zip(np.split(completion, cuts), np.split(is_trained_T, cuts), strict=True)
    return tuple(TextChunk(tokens, bool(is_trained[0])) for tokens, is_trained in parts if len(tokens))


def _build_input(prompt: Tokens, completion: Tokens, images: tuple[str, ...]) -> ModelInput:
    if not len(prompt) or not len(completion):
        return ModelInput.from_prompt(prompt, images).append_completion(completion)
    return ModelInput((TextChunk(prompt, False), TextChunk(completion, True)), images)  # twice as fast as appending


def image_digests(table: pa.Table) -> list[tuple[str, ...]]:
    """Return the digests of the images in the prompt of each row."""
    column = table["images"]
    if not lengths_of(column).any():
        return [()] * len(column)
    return [tuple(digests) for digests in column.to_pylist()]


def _build_image_column(inputs: Sequence[ModelInput]) -> dict[str, pa.Array]:
    return {"images": pa.array([each.images for each in inputs], pa.list_(pa.string()))}


def _build_expert_column(inputs: Sequence[ModelInput]) -> dict[str, pa.Array]:
    arrays = [each.experts for each in inputs if each.experts is not None]
    if not arrays:
        return {}
    assert len(arrays) == len(inputs), "experts are recorded for all rows or for none"
    return {EXPERTS: expert_lists(np.concatenate(arrays), np.array([len(experts) for experts in arrays], np.int64))}


def _build_column(rows: Sequence[Tokens]) -> pa.Array:
    return lists(_join_chunks(rows), np.array([len(row) for row in rows], np.int64))
