"""What a model reads, from data to the forward pass: one noun for engine, auxiliary passes, update, critic and judge.

It is also the one place that knows in which columns of prompts, rollouts and samples the tokens stand. Shapes: K rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from models.records.columns import Integers, Mask, concatenated, emptied, lengths_of, lists, row_arrays

COMPLETION_TOKENS: Final = "completion_tokens"
ROLLOUT_INPUT: Final = ("prompt_tokens", COMPLETION_TOKENS)
"""Columns that the inputs of rollouts are read from."""

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class TextChunk:
    """Tokens that follow each other and have one author."""

    tokens: Tokens
    is_written: bool
    """Whether a model wrote them, or is to learn to: it is asked how likely they are. All others are given to it."""

    def __eq__(self, other: object) -> bool:
        """Compare by value; arrays would compare element by element."""
        return (
            isinstance(other, TextChunk)
            and self.is_written == other.is_written
            and np.array_equal(self.tokens, other.tokens)
        )


@dataclass(frozen=True, slots=True)
class ModelInput:
    """A sequence as models read it: the prompt, which is given, and the completion, as far as there is one.

    A completion begins with the first token that is written. Every chunk says which tokens it takes in the sequence, so
    lengths, budgets and passes follow from them, whatever kind of chunk it is. No chunk is empty.
    """

    chunks: tuple[TextChunk, ...] = ()

    @classmethod
    def given(cls, tokens: ArrayLike) -> Self:
        """Begin with a prompt."""
        return cls(_chunk(tokens, is_written=False))

    def continued(self, tokens: ArrayLike) -> Self:
        """Append what a model wrote or is to learn to write."""
        return type(self)(self.chunks + _chunk(tokens, is_written=True))

    def __len__(self) -> int:
        """Count the tokens of all chunks."""
        return _length(self.chunks)

    @property
    def tokens(self) -> Tokens:
        """All tokens."""
        return _tokens_of(self.chunks)

    @property
    def prompt(self) -> Tokens:
        """Tokens before the first that is written."""
        return _tokens_of(self.chunks[: self._begin])

    @property
    def completion(self) -> Tokens:
        """Tokens from the first that is written on."""
        return _tokens_of(self.chunks[self._begin :])

    @property
    def written(self) -> NDArray[np.int64]:
        """Places of the tokens that are written: those that models are asked about and learn from."""
        are_written = [chunk.is_written for chunk in self.chunks]
        return np.flatnonzero(np.repeat(np.array(are_written, np.bool_), [len(chunk.tokens) for chunk in self.chunks]))

    @property
    def num_prompt_tokens(self) -> int:
        """Count the tokens before the first that is written."""
        return _length(self.chunks[: self._begin])

    @property
    def num_completion_tokens(self) -> int:
        """Count the tokens from the first that is written on."""
        return _length(self.chunks[self._begin :])

    @property
    def _begin(self) -> int:
        """Index of the completion's first chunk."""
        for index, chunk in enumerate(self.chunks):
            if chunk.is_written:
                return index
        return len(self.chunks)


def _chunk(tokens: ArrayLike, *, is_written: bool) -> tuple[TextChunk, ...]:
    ids = np.asarray(tokens, np.int32)
    return (TextChunk(ids, is_written),) if len(ids) else ()


def _length(chunks: Sequence[TextChunk]) -> int:
    return sum([len(chunk.tokens) for chunk in chunks])


def _tokens_of(chunks: Sequence[TextChunk]) -> Tokens:
    return chunks[0].tokens if len(chunks) == 1 else _joined([chunk.tokens for chunk in chunks])


def _joined(parts: Sequence[Tokens]) -> Tokens:
    return np.concatenate([np.zeros(0, np.int32), *parts])


def prompt_inputs(prompts: pa.Table) -> list[ModelInput]:
    """Read the inputs of a prompts table."""
    return [ModelInput.given(tokens) for tokens in row_arrays(prompts["tokens"], np.int32)]


def prompt_columns(inputs: Sequence[ModelInput]) -> dict[str, pa.Array]:
    """Spell inputs as the columns of a prompts table."""
    return {"tokens": _column([each.tokens for each in inputs])}


def rollout_inputs(rollouts: pa.Table) -> list[ModelInput]:
    """Read the inputs of a rollout table, completions as far as they are written."""
    return list(map(_input, *(row_arrays(rollouts[name], np.int32) for name in ROLLOUT_INPUT)))


def rollout_columns(inputs: Sequence[ModelInput]) -> dict[str, pa.Array]:
    """Spell inputs as the columns of a rollout table."""
    parts = ([each.prompt for each in inputs], [each.completion for each in inputs])
    return dict(zip(ROLLOUT_INPUT, map(_column, parts), strict=True))


def completion_lengths(rollouts: pa.Table) -> Integers:
    """Completion tokens of each row of a rollout table."""
    return lengths_of(rollouts[COMPLETION_TOKENS])


def sample_columns(rollouts: pa.Table, *, emptied_K: Mask) -> dict[str, pa.Array]:
    """Spell the inputs of rollouts as the columns of a sample table; those that are emptied keep their prompt alone."""
    prompts, completions = (rollouts[name] for name in ROLLOUT_INPUT)
    if emptied_K.any():
        completions = emptied(completions, emptied_K)
    counts = pa.array(lengths_of(prompts).astype(np.int32))
    return {"tokens": concatenated(prompts, completions), "num_prompt_tokens": counts}


def sample_lengths(samples: pa.Table) -> tuple[Integers, Integers]:
    """Tokens of each row of a sample table, and how many of them are the prompt's."""
    return lengths_of(samples["tokens"]), samples["num_prompt_tokens"].to_numpy().astype(np.int64)


def sample_inputs(samples: pa.Table) -> list[ModelInput]:
    """Read the inputs of a sample table."""
    rows = zip(row_arrays(samples["tokens"], np.int32), samples["num_prompt_tokens"].to_pylist(), strict=True)
    return [_input(tokens[:count], tokens[count:]) for tokens, count in rows]


def _input(prompt: Tokens, completion: Tokens) -> ModelInput:
    if not len(prompt) or not len(completion):
        return ModelInput.given(prompt).continued(completion)
    return ModelInput((TextChunk(prompt, False), TextChunk(completion, True)))  # so it is made in half the time


def _column(rows: Sequence[Tokens]) -> pa.Array:
    return lists(_joined(rows), np.array([len(row) for row in rows], np.int64))
