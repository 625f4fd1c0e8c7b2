"""Layout of a micro-batch: rows padded to one width, and the same tokens with every prompt stored once.

The functions are pure and do not use torch. A completion token here is one that a policy generated (`is_trained`).
Shapes: B rows of one micro-batch, T its padded width, N its completion tokens, L its tokens without padding (a prompt
that several rows share is counted once), P positions of its blocks in attention, K tokens of its rows without padding,
R those of its rows that have tokens of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from models.modeling.batching import pack
from models.records.model_input import ModelInput

Indexes = NDArray[np.int64]

SHARING_PAYS: Final = 1.1
"""Minimum number of padded tokens per token at which prompts are shared instead of padded.
Measured: the conversion to attention's blocks costs 4 to 7% of a forward pass of small models on one core.
"""


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """Model input with the training data of its completion tokens."""

    input: ModelInput
    logprobs: NDArray[np.float32]
    """Behavior log-probs, one per completion token."""
    advantages: NDArray[np.float32]
    """Advantages, one per completion token."""
    staleness: NDArray[np.int16]
    """Number of versions between the policy that generated each token and the policy under training."""
    values: NDArray[np.float32] | None = None
    """Critic's value of the state before each token, or None without a critic."""
    returns: NDArray[np.float32] | None = None
    """Training targets of the critic for these states, or None without a critic."""


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Tokens of a micro-batch in one row, with every prompt once, and their places in attention's padded blocks."""

    tokens_L: Indexes
    places_L: Indexes
    """Index of each token in the flattened B·T of the padded micro-batch.
    A shared token has the index of one of its rows.
    """
    positions_L: Indexes
    """Position of each token in its own sequence."""
    predicting_N: Indexes
    """Index (in L) of the token whose state predicts each completion token."""
    places_P: Indexes
    """Index (in L) of the token at each position of the blocks, one block after another. Padding refers to token 0."""
    collected_L: Indexes
    """One position (in P) of each token."""
    blocks: tuple[tuple[int, int], ...]
    """Number of rows and width of each block."""
    keys_K: Indexes
    """Indices (in L) of the tokens of each row with own tokens, without padding, one row after another."""
    keys_R: Indexes
    """Number of tokens of each row with own tokens, without padding."""
    queries_R: Indexes
    """Number of own tokens of each row with own tokens, in the order of L.

    They are the last tokens of the row. A shared prompt belongs to the first of its rows.
    """
    prompts: tuple[ModelInput, ...]
    """One input per prompt that begins with that prompt, in the order of the prompts' tokens."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Input of one forward pass, padded on the right, where causal attention never looks."""

    inputs: tuple[ModelInput, ...]
    tokens_BT: Indexes
    positions_N: Indexes
    """Index into the flattened B·T of the state that predicts each completion token."""
    targets_N: Indexes
    rows_N: Indexes
    """Index of the input to which each completion token belongs. An input without completion tokens does not occur."""
    shared: SharedRows | None
    """The same tokens without padding and with every prompt once, or None if this would save too little."""


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Micro-batch of training samples: the input of one forward pass and the training data of its completion tokens."""

    microbatch: MicroBatch
    behavior_N: NDArray[np.float32]
    advantages_N: NDArray[np.float32]
    staleness_N: NDArray[np.int16]
    values_N: NDArray[np.float32] | None
    """Critic's values, or None without a critic, like `returns_N`. In an empty micro-batch both are empty arrays."""
    returns_N: NDArray[np.float32] | None
    weights_N: NDArray[np.float32]
    """Weight of each token in the loss of the whole minibatch."""


AuxiliaryForward = Callable[[Sequence[MicroBatch]], list[NDArray[np.float32]]]
"""Function that computes one number per completion token: one array of shape (N,) per micro-batch.

Collective: all ranks call it together with equally many micro-batches. An empty micro-batch has no completion token.
"""


def lay_out(inputs: Sequence[ModelInput], *, in_one_row: bool = False) -> MicroBatch:
    """Lay inputs out as one micro-batch. Without inputs, the micro-batch has tokens to run but no completion tokens.

    With `in_one_row`, prompts are always shared, even if that saves nothing.
    """
    lengths_B = np.array([len(each) for each in inputs], np.int64)
    width = int(lengths_B.max(initial=0)) or 2
    holds_BT = np.arange(width) < lengths_B[:, None]
    chunks = [chunk for each in inputs for chunk in each.chunks]
    ids = [chunk.tokens for chunk in chunks]
    tokens = np.concatenate([np.zeros(0, np.int32), *ids]).astype(np.int64)
    written = np.repeat(np.array([chunk.is_trained for chunk in chunks], np.bool_), list(map(len, ids)))
    tokens_BT = np.zeros((max(1, len(inputs)), width), np.int64)
    tokens_BT[: len(inputs)][holds_BT] = tokens
    places_N = np.flatnonzero(holds_BT)[written]
    return MicroBatch(
        inputs=tuple(inputs),
        tokens_BT=tokens_BT,
        positions_N=places_N - 1,
        targets_N=tokens[written],
        rows_N=places_N // width,
        shared=_build_shared_row(
            inputs, tokens_BT, holds_BT, predicting_N=places_N - 1, least=0 if in_one_row else SHARING_PAYS
        ),
    )


def _build_shared_row(
    inputs: Sequence[ModelInput],
    tokens_BT: Indexes,
    holds_BT: NDArray[np.bool_],
    *,
    predicting_N: Indexes,
    least: float,
) -> SharedRows | None:
    token_BT, num_tokens, prompts = _number_tokens(inputs, tokens_BT.shape[1])
    if not inputs or tokens_BT.size < least * num_tokens:
        return None
    rows, lengths = tuple(range(len(inputs))), holds_BT.sum(axis=1)
    blocks = [list(block) for block in pack(rows, lengths.tolist(), budget=tokens_BT.size)]  # similar lengths together
    widths = [int(lengths[block].max()) for block in blocks]
    spans = [(block, slice(width)) for block, width in zip(blocks, widths, strict=True)]
    holds_P = np.concatenate([holds_BT[block][:, part].ravel() for block, part in spans])
    places_P = np.concatenate([token_BT[block][:, part].ravel() for block, part in spans])
    _, first_L = np.unique(places_P[holds_P], return_index=True)
    places_L = np.zeros(num_tokens, np.int64)
    places_L[token_BT[holds_BT]] = np.flatnonzero(holds_BT)
    own_B = np.diff(np.maximum.accumulate([-1, *token_BT.max(axis=1)]))  # numbers increase from row to row
    return SharedRows(
        tokens_L=tokens_BT.ravel()[places_L],
        places_L=places_L,
        positions_L=places_L % tokens_BT.shape[1],
        predicting_N=token_BT.ravel()[predicting_N],
        places_P=places_P,
        collected_L=np.flatnonzero(holds_P)[first_L],
        blocks=tuple((len(block), width) for block, width in zip(blocks, widths, strict=True)),
        keys_K=token_BT[own_B > 0][holds_BT[own_B > 0]],
        keys_R=lengths[own_B > 0],
        queries_R=own_B[own_B > 0],
        prompts=prompts,
    )


def _number_tokens(inputs: Sequence[ModelInput], width: int) -> tuple[Indexes, int, tuple[ModelInput, ...]]:
    """Number the tokens of a micro-batch and share the numbers of equal prompts.

    Prompts with different images or routed experts are not shared. Returns the number of each token (B x T), the count
    of numbers, and one input per distinct prompt.
    """
    token_BT = np.zeros((max(1, len(inputs)), width), np.int64)
    begins: dict[tuple[bytes, tuple[str, ...], bytes], tuple[int, ModelInput]] = {}
    used = 0
    for token_T, each in zip(token_BT, inputs, strict=False):
        prompt, total = each.num_prompt_tokens, len(each)
        routed = b"" if each.experts is None else each.experts[:prompt].tobytes()
        name = (each.prompt.tobytes(), each.images, routed)
        if name not in begins:
            begins[name], used = (used, each), used + prompt
        token_T[:prompt] = np.arange(begins[name][0], begins[name][0] + prompt)
        token_T[prompt:total] = np.arange(used, used + total - prompt)
        used += total - prompt
    return token_BT, used, tuple(first for _, first in begins.values())


def lay_out_samples(samples: Sequence[TrainingSample], weights: Sequence[float]) -> TrainingBatch:
    """Lay samples out as one micro-batch. `weights` holds the loss weight of each sample's tokens."""
    return TrainingBatch(
        microbatch=lay_out([sample.input for sample in samples]),
        behavior_N=_join([sample.logprobs for sample in samples]),
        advantages_N=_join([sample.advantages for sample in samples]),
        staleness_N=np.concatenate([np.zeros(0, np.int16), *(sample.staleness for sample in samples)]),
        values_N=_join_if_complete([sample.values for sample in samples]),
        returns_N=_join_if_complete([sample.returns for sample in samples]),
        weights_N=np.repeat(np.asarray(weights, np.float32), [len(sample.logprobs) for sample in samples]),
    )


def _join(parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    return np.concatenate([np.zeros(0, np.float32), *parts])


def _join_if_complete(parts: Sequence[NDArray[np.float32] | None]) -> NDArray[np.float32] | None:
    arrays = [part for part in parts if part is not None]
    return _join(arrays) if len(arrays) == len(parts) else None
