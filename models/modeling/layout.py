"""What one forward pass reads: rows padded to one width, and the same tokens with every prompt once.

Pure and torch-free. Shapes: B rows of one pass, T its padded width, N written tokens of one pass, L its tokens without
padding, those of a prompt that several rows share counted once, P places of its blocks in attention, K tokens of its
rows without padding, R those of its rows that have tokens of their own.
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
"""Padded tokens per token from which on a pass is not padded: spreading over attention's blocks costs 4 to 7% of a
pass of small models on one core, measured."""


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """What a model reads, and what the tokens that are written in it are worth."""

    input: ModelInput
    logprobs: NDArray[np.float32]
    """Behaviour log-probs, one per written token."""
    advantages: NDArray[np.float32]
    """One per written token."""
    staleness: NDArray[np.int16]
    """Versions between the policy that wrote each token and the one that learns from it."""
    values: NDArray[np.float32] | None = None
    """The critic's value of the state that each token was drawn in; none without a critic."""
    returns: NDArray[np.float32] | None = None
    """What the critic learns of these states; none without a critic."""


@dataclass(frozen=True, slots=True)
class SharedRows:
    """The tokens of a pass in one row, every prompt once, and where attention sees them: padded blocks of rows."""

    tokens_L: Indexes
    places_L: Indexes
    """Index of each token in the flattened B·T of the pass when it is padded; of a shared one in one of its rows."""
    positions_L: Indexes
    """Place of each token in its own sequence."""
    predicting_N: Indexes
    """Token whose state predicts each written one."""
    places_P: Indexes
    """Token at each place of the blocks, one block after another; padding shows the first."""
    collected_L: Indexes
    """A place of each token."""
    blocks: tuple[tuple[int, int], ...]
    """Rows and width of each."""
    keys_K: Indexes
    """Tokens of each row with tokens of its own, without padding, one row after another."""
    keys_R: Indexes
    """How many each of these rows has."""
    queries_R: Indexes
    """How many of them are its own: its last ones, a prompt's those of the first of its rows. In the order of L."""
    prompts: tuple[ModelInput, ...]
    """For every prompt one of the inputs that begin with it, in the order of the prompts' tokens."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward pass reads, padded on the right, where causal attention never looks."""

    inputs: tuple[ModelInput, ...]
    tokens_BT: Indexes
    positions_N: Indexes
    """Index into the flattened B·T of the state that predicts each written token."""
    targets_N: Indexes
    rows_N: Indexes
    """Which input of the pass each token is of, from 0; an input in which nothing is written has none."""
    shared: SharedRows | None
    """The same without padding, every prompt once; none where that would save too little."""


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """What one forward pass reads, and what is learnt from it."""

    reads: MicroBatch
    behaviour_N: NDArray[np.float32]
    advantages_N: NDArray[np.float32]
    staleness_N: NDArray[np.int16]
    values_N: NDArray[np.float32] | None
    """Like `returns_N` none without a critic; an empty pass has both, with no element."""
    returns_N: NDArray[np.float32] | None
    weights_N: NDArray[np.float32]
    """Share of each token in the loss of the whole minibatch."""


AuxiliaryPass = Callable[[Sequence[MicroBatch]], list[NDArray[np.float32]]]
"""Says one number of each written token: per pass one array of N, in the order of the pass. All ranks ask together,
with as many passes each; an empty pass has no token."""


def lay_out(inputs: Sequence[ModelInput], *, in_one_row: bool = False) -> MicroBatch:
    """Lay inputs out as one pass; none at all make an empty one: tokens to run and none that is written.

    `in_one_row` has all that are not empty share, whatever that saves.
    """
    lengths_B = np.array([len(each) for each in inputs], np.int64)
    width = int(lengths_B.max(initial=0)) or 2
    holds_BT = np.arange(width) < lengths_B[:, None]
    chunks = [chunk for each in inputs for chunk in each.chunks]
    ids = [chunk.tokens for chunk in chunks]
    tokens = np.concatenate([np.zeros(0, np.int32), *ids]).astype(np.int64)
    written = np.repeat(np.array([chunk.is_written for chunk in chunks], np.bool_), list(map(len, ids)))
    tokens_BT = np.zeros((max(1, len(inputs)), width), np.int64)
    tokens_BT[: len(inputs)][holds_BT] = tokens
    places_N = np.flatnonzero(holds_BT)[written]
    return MicroBatch(
        inputs=tuple(inputs),
        tokens_BT=tokens_BT,
        positions_N=places_N - 1,
        targets_N=tokens[written],
        rows_N=places_N // width,
        shared=_share(inputs, tokens_BT, holds_BT, predicting_N=places_N - 1, least=0 if in_one_row else SHARING_PAYS),
    )


def _share(
    inputs: Sequence[ModelInput],
    tokens_BT: Indexes,
    holds_BT: NDArray[np.bool_],
    *,
    predicting_N: Indexes,
    least: float,
) -> SharedRows | None:
    token_BT, num_tokens, prompts = _numbered(inputs, tokens_BT.shape[1])
    if not inputs or tokens_BT.size < least * num_tokens:
        return None
    rows, lengths = tuple(range(len(inputs))), holds_BT.sum(axis=1)
    blocks = [list(block) for block in pack(rows, lengths.tolist(), budget=tokens_BT.size)]  # like lengths together
    widths = [int(lengths[block].max()) for block in blocks]
    shown = [(block, slice(width)) for block, width in zip(blocks, widths, strict=True)]
    holds_P = np.concatenate([holds_BT[block][:, part].ravel() for block, part in shown])
    places_P = np.concatenate([token_BT[block][:, part].ravel() for block, part in shown])
    _, first_L = np.unique(places_P[holds_P], return_index=True)
    places_L = np.zeros(num_tokens, np.int64)
    places_L[token_BT[holds_BT]] = np.flatnonzero(holds_BT)
    own_B = np.diff(np.maximum.accumulate([-1, *token_BT.max(axis=1)]))  # numbers go on from row to row
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


def _numbered(inputs: Sequence[ModelInput], width: int) -> tuple[Indexes, int, tuple[ModelInput, ...]]:
    """Number the tokens of a pass, those of a prompt once; of one that was routed in two ways, of each way.

    Returns which stands where, how many there are, and an input of each prompt.
    """
    token_BT = np.zeros((max(1, len(inputs)), width), np.int64)
    begins: dict[tuple[bytes, tuple[str, ...], bytes], tuple[int, ModelInput]] = {}
    used = 0
    for token_T, each in zip(token_BT, inputs, strict=False):
        prompt, whole = each.num_prompt_tokens, len(each)
        routed = b"" if each.experts is None else each.experts[:prompt].tobytes()
        name = (each.prompt.tobytes(), each.images, routed)
        if name not in begins:
            begins[name], used = (used, each), used + prompt
        token_T[:prompt] = np.arange(begins[name][0], begins[name][0] + prompt)
        token_T[prompt:whole] = np.arange(used, used + whole - prompt)
        used += whole - prompt
    return token_BT, used, tuple(first for _, first in begins.values())


def lay_out_samples(samples: Sequence[TrainingSample], weights: Sequence[float]) -> TrainingBatch:
    """Lay samples out as one pass; `weights` are those of each sample's tokens."""
    return TrainingBatch(
        reads=lay_out([sample.input for sample in samples]),
        behaviour_N=_joined([sample.logprobs for sample in samples]),
        advantages_N=_joined([sample.advantages for sample in samples]),
        staleness_N=np.concatenate([np.zeros(0, np.int16), *(sample.staleness for sample in samples)]),
        values_N=_joined_if_known([sample.values for sample in samples]),
        returns_N=_joined_if_known([sample.returns for sample in samples]),
        weights_N=np.repeat(np.asarray(weights, np.float32), [len(sample.logprobs) for sample in samples]),
    )


def _joined(parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    return np.concatenate([np.zeros(0, np.float32), *parts])


def _joined_if_known(parts: Sequence[NDArray[np.float32] | None]) -> NDArray[np.float32] | None:
    known = [part for part in parts if part is not None]
    return _joined(known) if len(known) == len(parts) else None
