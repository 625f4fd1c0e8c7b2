"""Choice of the tokens that the correction `second_moment` masks, and of the tokens that `update.top_entropy` masks.

Both choices depend on all tokens of a minibatch. Therefore they are made before the first optimizer step, from the old
log-probs and the entropies on all ranks. Shapes: N completion tokens of one micro-batch, M completion tokens of a
minibatch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.modeling.layout import TrainingBatch
from rheostat.models.training.ranks import Ranks, broadcast_bytes, gather_bytes


@dataclass(frozen=True, slots=True)
class LowEntropy:
    """Tokens of a minibatch that `update.top_entropy` masks, on one rank."""

    threshold: float
    """Entropy in nats below which a token is masked. It is 0 if no token of the minibatch is trained."""
    masks: list[Tensor]
    """Whether each token (N) is masked, for each micro-batch."""


def find_low_entropy(
    batches: Sequence[TrainingBatch], entropies: Sequence[Tensor], *, fraction: float, ranks: Ranks
) -> LowEntropy:
    """Return the tokens of a minibatch that do not belong to the `fraction` with the highest entropy (arXiv 2506.01939,
    the indicator in the loss). `entropies` are the policy's entropies before the first optimizer step (N each).

    The threshold is a quantile over the tokens with a weight in the loss. Tokens at the threshold are not masked.
    Collective: every rank must call this.
    """
    trained = [torch.from_numpy(batch.weights_N).to(ranks.device) != 0 for batch in batches]
    own_M = torch.cat([entropy_N[trained_N] for entropy_N, trained_N in zip(entropies, trained, strict=True)])
    threshold = _agree_on_limit(own_M, partial(top_quantile, fraction=fraction), ranks)
    masks = [trained_N & (entropy_N < threshold) for entropy_N, trained_N in zip(entropies, trained, strict=True)]
    return LowEntropy(threshold=threshold, masks=masks)


def top_quantile(entropies_M: NDArray[np.float32], fraction: float) -> float:
    """Return the entropy that the share `fraction` of the given entropies reaches, with linear interpolation between
    two entropies. Returns 0 if there are none."""
    return float(np.quantile(entropies_M.astype(np.float64), 1 - fraction)) if len(entropies_M) else 0.0


def find_outliers(
    batches: Sequence[TrainingBatch], old: Sequence[Tensor], *, config: UpdateConfig, ranks: Ranks
) -> list[Tensor]:
    """Return for each micro-batch of a minibatch on this rank whether a correction `second_moment` masks each token
    (N). `old` are the trainer's log-probs before the first optimizer step.

    Each correction counts only the tokens to which it applies and that have a weight in the loss. Collective: every
    rank must call this.
    """
    staleness = [torch.from_numpy(batch.staleness_N).to(ranks.device) for batch in batches]
    trained = [torch.from_numpy(batch.weights_N).to(ranks.device) != 0 for batch in batches]
    squares = [
        (old_N - torch.from_numpy(batch.behavior_N).to(ranks.device)).float().square()
        for batch, old_N in zip(batches, old, strict=True)
    ]
    outliers = [torch.zeros_like(square_N, dtype=torch.bool) for square_N in squares]
    for index, correction in enumerate(config.corrections):
        if correction.moment_limit is None:
            continue
        applies = trained
        if config.stale_correction is not None:
            applies = [
                trained_N & ((staleness_N > 0) == bool(index))
                for trained_N, staleness_N in zip(trained, staleness, strict=True)
            ]
        own_M = torch.cat([square_N[applies_N] for square_N, applies_N in zip(squares, applies, strict=True)])
        limit = _agree_on_limit(own_M, partial(largest_kept, max_moment=correction.moment_limit), ranks)
        for number, applies_N in enumerate(applies):
            outliers[number] |= applies_N & (squares[number] > limit)
    return outliers


def _agree_on_limit(own_M: Tensor, compute_limit: Callable[[NDArray[np.float32]], float], ranks: Ranks) -> float:
    """Return the result of `compute_limit` for the values of all ranks, rounded to float32. `own_M` are the values of
    this rank. A sequence-parallel group contributes its values only once. Collective: every rank must call this."""
    parts = gather_bytes(own_M.cpu().numpy().tobytes() if ranks.reports_metrics else b"", ranks)
    limit = compute_limit(np.frombuffer(b"".join(parts), np.float32))  # empty except on rank 0
    return float(np.frombuffer(broadcast_bytes(np.float32(limit).tobytes(), ranks), np.float32)[0])


def largest_kept(squares_M: NDArray[np.float32], max_moment: float) -> float:
    """Return the largest of the given squares that is kept, so that the mean of all kept squares is at most
    `max_moment` (M2PO, arXiv 2510.01161). Equal squares are all kept or all masked. Returns -1 if none is kept.

    The squares are sorted before they are added in float64, so their order does not matter.
    """
    sorted_M = np.sort(squares_M)
    means_M = np.cumsum(sorted_M, dtype=np.float64) / np.arange(1, len(sorted_M) + 1)
    is_last_M = np.append(sorted_M[1:] != sorted_M[:-1], True)[: len(sorted_M)]  # of equal squares
    kept = np.flatnonzero((means_M <= max_moment) & is_last_M)
    return float(sorted_M[kept[-1]]) if len(kept) else -1.0
