"""From model inputs to padded micro-batches: which inputs meet in which optimizer step, on which rank, in which pass.

Pure and torch-free. Every rank computes the whole plan from the lengths alone and lays out its own part.
Shapes: B rows of one pass, T its padded width, N written tokens of one pass, L tokens of all its rows without padding.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.records.model_input import ModelInput

Rows = tuple[int, ...]

PASS_TOKENS = 128
"""What a pass costs beside its tokens, in tokens: 2.5 ms against 20 µs each for a small model on one core, measured."""


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
class StepPlan:
    """One optimizer step: the passes of every rank, as many for each; an empty pass keeps a rank in step."""

    passes: tuple[tuple[Rows, ...], ...]
    """[rank][pass] → rows."""

    @property
    def rows(self) -> Rows:
        """All rows of the step, in order."""
        return tuple(sorted(row for rank in self.passes for rows in rank for row in rows))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward pass reads, padded on the right, where causal attention never looks."""

    inputs: tuple[ModelInput, ...]
    tokens_BT: NDArray[np.int64]
    positions_N: NDArray[np.int64]
    """Index into the flattened B·T of the state that predicts each written token."""
    targets_N: NDArray[np.int64]
    rows_N: NDArray[np.int64]
    """Which input of the pass each token is of, from 0; an input in which nothing is written has none."""


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


def plan_steps(
    groups: Sequence[int],
    lengths: Sequence[int],
    *,
    minibatches: int,
    ranks: int,
    microbatch_tokens: int,
    seed: int,
) -> list[StepPlan]:
    """Deal groups to optimizer steps, balance each step over the ranks, and cut each rank's part into passes."""
    return [
        plan_step(rows, lengths, ranks=ranks, microbatch_tokens=microbatch_tokens)
        for rows in split_minibatches(groups, lengths, minibatches=minibatches, seed=seed)
    ]


def plan_step(rows: Rows, lengths: Sequence[int], *, ranks: int, microbatch_tokens: int) -> StepPlan:
    """Balance one step's rows over the ranks and cut each rank's part into passes."""
    parts = balance([lengths[row] for row in rows], ranks)
    passes = [pack(tuple(rows[i] for i in part), lengths, budget=microbatch_tokens) for part in parts]
    most = max(len(part) for part in passes)
    return StepPlan(tuple(part + ((),) * (most - len(part)) for part in passes))


def split_minibatches(groups: Sequence[int], lengths: Sequence[int], *, minibatches: int, seed: int) -> list[Rows]:
    """Split rows into at most `minibatches` parts of whole groups: as many groups and about as many tokens in each.

    Which groups meet depends on the seed; so does the order of the parts.
    """
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    random = np.random.default_rng(seed)
    names = sorted(members)
    shuffled = [names[i] for i in random.permutation(len(names))]
    tokens = {group: sum(lengths[row] for row in members[group]) for group in names}
    by_size = sorted(shuffled, key=lambda group: -tokens[group])
    parts: list[list[int]] = [[] for _ in range(min(minibatches, len(names)))]
    load = [0] * len(parts)
    for start in range(0, len(by_size), max(1, len(parts))):
        lightest = sorted(range(len(parts)), key=lambda part: load[part])
        for part, group in zip(lightest, by_size[start : start + len(parts)], strict=False):
            parts[part].extend(members[group])
            load[part] += tokens[group]
    return [tuple(sorted(parts[i])) for i in random.permutation(len(parts))]


def balance(weights: Sequence[int], parts: int) -> list[Rows]:
    """Split items into parts of nearly equal weight by largest differencing (Karmarkar and Karp, 1982).

    Each partial solution is the tuple of its parts, heaviest first; the two that differ most inside themselves are
    merged, heaviest with lightest, until one is left.
    """
    empty: list[tuple[int, Rows]] = [(0, ())] * (parts - 1)
    heap = [(-weight, item, [(weight, (item,)), *empty]) for item, weight in enumerate(weights)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, item, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], item, merged))
    return [tuple(sorted(rows)) for _, rows in heap[0][2]] if heap else [()] * parts


def pack(rows: Rows, lengths: Sequence[int], *, budget: int) -> tuple[Rows, ...]:
    """Cut rows, longest first, into the cheapest passes of at most `budget` padded tokens.

    The cost is padded tokens and `PASS_TOKENS` per pass. A sequence longer than the budget gets its own pass.
    """
    order = sorted(rows, key=lambda row: (-lengths[row], row))
    widths = np.array([lengths[row] for row in order], dtype=np.int64)
    cheapest = np.zeros(len(order) + 1, dtype=np.int64)
    cuts = [0] * (len(order) + 1)
    for end in range(1, len(order) + 1):
        starts = np.arange(max(0, min(end - 1, end - budget // int(widths[end - 1]))), end)
        padded = (end - starts) * widths[starts]
        cost = cheapest[starts] + padded + PASS_TOKENS
        cost[(padded > budget) & (starts < end - 1)] = np.iinfo(np.int64).max
        best = int(cost.argmin())
        cheapest[end], cuts[end] = cost[best], int(starts[best])
    passes: list[Rows] = []
    end = len(order)
    while end:
        passes.append(tuple(order[cuts[end] : end]))
        end = cuts[end]
    return tuple(reversed(passes))


def lay_out(inputs: Sequence[ModelInput]) -> MicroBatch:
    """Pad inputs to the longest; none at all make an empty pass, which has tokens to run and none that is written."""
    lengths_B = np.array([len(each) for each in inputs], np.int64)
    width = int(lengths_B.max(initial=0)) or 2
    holds_BT = np.arange(width) < lengths_B[:, None]
    chunks = [chunk for each in inputs for chunk in each.chunks]
    ids = [chunk.tokens for chunk in chunks]
    tokens_L = np.concatenate([np.zeros(0, np.int32), *ids]).astype(np.int64)
    written_L = np.repeat(np.array([chunk.is_written for chunk in chunks], np.bool_), list(map(len, ids)))
    tokens_BT = np.zeros((max(1, len(inputs)), width), np.int64)
    tokens_BT[: len(inputs)][holds_BT] = tokens_L
    places_N = np.flatnonzero(holds_BT)[written_L]
    return MicroBatch(
        inputs=tuple(inputs),
        tokens_BT=tokens_BT,
        positions_N=places_N - 1,
        targets_N=tokens_L[written_L],
        rows_N=places_N // width,
    )


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
