"""Choice of the tokens that the correction `second_moment` masks.

The choice depends on all tokens of a minibatch. Therefore it is made before the first optimizer step, from the old
log-probs on all ranks. Shapes: N completion tokens of one micro-batch, M completion tokens of a minibatch.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.modeling.layout import TrainingBatch
from rheostat.models.training.ranks import Ranks, broadcast_bytes, gather_bytes


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
        limit = _agree_on_largest_kept(own_M, correction.moment_limit, ranks)
        for number, applies_N in enumerate(applies):
            outliers[number] |= applies_N & (squares[number] > limit)
    return outliers


def _agree_on_largest_kept(own_M: Tensor, max_moment: float, ranks: Ranks) -> float:
    """Return `largest_kept` for the squares of all ranks. `own_M` are the squares of this rank. A sequence-parallel
    group contributes its squares only once. Collective: every rank must call this."""
    parts = gather_bytes(own_M.cpu().numpy().tobytes() if ranks.reports_metrics else b"", ranks)
    limit = largest_kept(np.frombuffer(b"".join(parts), np.float32), max_moment)  # empty except on rank 0
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
