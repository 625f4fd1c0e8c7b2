"""Layout of a micro-batch in two forms: rows padded to one width, and a single row in which every prompt is stored
once.

The functions are pure and do not use torch. A completion token here is one that a policy generated (`is_trained`).
Shapes: B rows of a micro-batch, T its padded width, N its completion tokens, L tokens of the single row (a prompt that
several rows share is counted once), P positions of the padded blocks used in attention, K tokens of the R rows without
padding, R rows that contain tokens that no earlier row contains.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rheostat.models.modeling.batching import pack
from rheostat.models.records.columns import Number
from rheostat.models.records.model_input import ModelInput

Indexes = NDArray[np.int64]

SHARING_PAYS: Final = 1.1
"""Minimum ratio between the tokens of padded rows and the tokens of the single row without repeated prompts at which
the single row is used. Measured: copying tokens into padded blocks for attention costs 4 to 7% of a forward pass of
small models on one core."""


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One sequence for training: the input of the policy, with the advantage and other training data of each completion
    token."""

    input: ModelInput
    logprobs: NDArray[np.float32]
    """Behavior log-prob of each completion token, which is its log-prob under the policy that generated it."""
    advantages: NDArray[np.float32]
    """Advantage of each completion token, which scales the token's gradient in the policy loss."""
    staleness: NDArray[np.int16]
    """Age of each completion token: number of policy versions between the one that generated the token and the one in
    training."""
    values: NDArray[np.float32] | None = None
    """Critic's value of the state before each completion token, or None without a critic."""
    returns: NDArray[np.float32] | None = None
    """Training target of the critic for the state before each completion token, or None without a critic."""
    top_ids: NDArray[np.int32] | None = None
    """IDs of the teacher's k most probable tokens at each completion token (tokens x k), or None if they were not
    stored."""
    top_logprobs: NDArray[np.float32] | None = None
    """Log-probs of these tokens under the teacher (tokens x k), or None if they were not stored."""


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Tokens of a micro-batch concatenated into a single row that contains every shared prompt once. The indices map
    tokens to the padded blocks that attention needs, and back."""

    tokens_L: Indexes
    places_L: Indexes
    """Index of each token of the single row in the flattened padded micro-batch (rows x width). For a token of a shared
    prompt, this is the index in one of the rows that contain the prompt."""
    positions_L: Indexes
    """Position of each token of the single row within the sequence to which the token belongs."""
    predicting_N: Indexes
    """For each completion token, the index in the single row of the token before it, whose state predicts it."""
    places_P: Indexes
    """Index in the single row of the token at each position of attention's padded blocks, one block after another.
    Padding has index 0."""
    collected_L: Indexes
    """For each token of the single row, the position in attention's padded blocks from which its attention output is
    read."""
    blocks: tuple[tuple[int, int], ...]
    """Number of rows and width of each block. A block is a set of rows padded to one width for attention."""
    keys_K: Indexes
    """Indices in the single row of all tokens of the rows, without padding, one row after another. A shared prompt is
    repeated for each row. Flash kernels use these tokens as keys."""
    keys_R: Indexes
    """Number of tokens of each row, including its prompt, without padding. Flash kernels use these tokens as keys."""
    queries_R: Indexes
    """Number of tokens at the end of each row that no earlier row contains. Flash kernels use them as queries. A shared
    prompt counts only in the first row that contains it."""
    prompts: tuple[ModelInput, ...]
    """One input for each distinct prompt, in the order in which the single row stores the prompts. The input is a
    sequence that begins with the prompt."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Input of one forward pass: rows of token IDs, padded on the right. No mask is needed, because causal attention
    never uses later tokens."""

    inputs: tuple[ModelInput, ...]
    tokens_BT: Indexes
    positions_N: Indexes
    """For each completion token, the index of the state that predicts it in the flattened micro-batch (rows x width).
    This is the state of the token before it."""
    targets_N: Indexes
    rows_N: Indexes
    """Row number of each completion token. The number of a row without completion tokens does not occur."""
    shared: SharedRows | None
    """Same tokens as a single row that contains every shared prompt once, or None if this would save too few tokens."""


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Micro-batch of training samples: the input of one forward pass, and the training data (such as advantages) of its
    completion tokens."""

    microbatch: MicroBatch
    behavior_N: NDArray[np.float32]
    advantages_N: NDArray[np.float32]
    staleness_N: NDArray[np.int16]
    values_N: NDArray[np.float32] | None
    """Critic's value for each completion token. Without a critic, both `values_N` and `returns_N` are None. In an empty
    micro-batch both are empty arrays."""
    returns_N: NDArray[np.float32] | None
    weights_N: NDArray[np.float32]
    """Weight of each completion token in the loss of the whole minibatch (all micro-batches of one optimizer step)."""
    top_ids_NK: NDArray[np.int32]
    """IDs of the teacher's k most probable tokens at each completion token. K is 0 if they were not stored, or if the
    micro-batch is empty."""
    top_logprobs_NK: NDArray[np.float32]
    """Log-probs of these tokens under the teacher."""
    selected_N: NDArray[np.bool_] | None = None
    """Mask of the completion tokens that the loss has selected in the whole minibatch, or None if it selects none."""
    positive_weights_N: NDArray[np.float32] | None = None
    """Weight of each completion token in the mean negative log-likelihood of the minibatch's correct completions, or
    None if the loss does not contain this mean."""


AuxiliaryForward = Callable[[Sequence[MicroBatch]], list[NDArray[np.float32]]]
"""Function that computes one number per completion token with an auxiliary model, such as a reference. Returns one
array per micro-batch. Collective: every rank must call it with the same number of micro-batches, some of which may be
empty."""


def lay_out(inputs: Sequence[ModelInput], *, in_one_row: bool = False) -> MicroBatch:
    """Build one micro-batch from inputs. Without inputs, the micro-batch contains padding, so that a forward pass can
    run, but no completion tokens. With `in_one_row`, the single row that stores each shared prompt once is always
    built, even if it saves nothing."""
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
    """Assign numbers to the tokens of a micro-batch so that the tokens of equal prompts get the same numbers. Prompts
    with different images or routed experts are not equal. Returns the number of each token (rows x width), the count of
    distinct numbers, and one input per distinct prompt."""
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
    """Build one micro-batch from training samples. `weights` holds one loss weight per sample, which applies to each of
    its completion tokens."""
    return TrainingBatch(
        microbatch=lay_out([sample.input for sample in samples]),
        behavior_N=_join([sample.logprobs for sample in samples]),
        advantages_N=_join([sample.advantages for sample in samples]),
        staleness_N=np.concatenate([np.zeros(0, np.int16), *(sample.staleness for sample in samples)]),
        values_N=_join_if_complete([sample.values for sample in samples]),
        returns_N=_join_if_complete([sample.returns for sample in samples]),
        weights_N=np.repeat(np.asarray(weights, np.float32), [len(sample.logprobs) for sample in samples]),
        top_ids_NK=_stack([sample.top_ids for sample in samples], np.int32),
        top_logprobs_NK=_stack([sample.top_logprobs for sample in samples], np.float32),
    )


def _stack(parts: Sequence[NDArray[Number] | None], dtype: type[Number]) -> NDArray[Number]:
    """Concatenate arrays of shape (tokens, k). Without arrays, the result has shape (0, 0)."""
    arrays = [part for part in parts if part is not None]
    return np.concatenate(arrays) if arrays else np.zeros((0, 0), dtype)


def _join(parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    return np.concatenate([np.zeros(0, np.float32), *parts])


def _join_if_complete(parts: Sequence[NDArray[np.float32] | None]) -> NDArray[np.float32] | None:
    arrays = [part for part in parts if part is not None]
    return _join(arrays) if len(arrays) == len(parts) else None
