"""Sequence parallelism (DeepSpeed-Ulysses, arXiv 2309.14509, section 3): several ranks compute one row together.

Each rank computes a slice of the row's tokens. In attention it computes a share of the heads over the whole row: one
all-to-all exchange of queries, keys and values takes place before attention, and another exchange after it. The sum of
the gradients of all ranks is the gradient of the row.

Shapes: L tokens of a row, S tokens of a slice, H heads, A heads of one rank in attention, D values of a head, N
completion tokens of a micro-batch, M completion tokens that one rank's slice predicts.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch.distributed as dist
from torch import Tensor

from rheostat.models.modeling.layout import Indexes, SharedRows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class SequenceParallelGroup:
    """Ranks that compute the same row of tokens together, each rank a slice, with the position of this rank in the
    group."""

    group: "ProcessGroup"
    size: int
    rank: int

    def slice_row(self, row: SharedRows) -> tuple[SharedRows, Indexes]:
        """Return this rank's slice of a row of tokens, and the indices of the completion tokens that the slice
        predicts. The indices for attention still describe the whole row. The row is padded with unused tokens to a
        multiple of the group size."""
        filling = (0, -len(row.tokens_L) % self.size)
        tokens_L, positions_L = np.pad(row.tokens_L, filling), np.pad(row.positions_L, filling)
        width = len(tokens_L) // self.size
        begin = self.rank * width
        own_M = np.flatnonzero(row.predicting_N // width == self.rank)
        return replace(
            row,
            tokens_L=tokens_L[begin : begin + width],
            positions_L=positions_L[begin : begin + width],
            predicting_N=row.predicting_N[own_M] - begin,
            collected_L=np.pad(row.collected_L, filling),
        ), own_M

    def gather_tokens(self, states_1HSD: Tensor) -> Tensor:
        """Exchange states before attention. The input has all heads for this rank's slice of the tokens, and the output
        has this rank's heads for all tokens (1 x heads of this rank x tokens x head size). Collective: all ranks of the
        group must call this."""
        return self._exchanged(states_1HSD.transpose(1, 2), scattered=2, gathered=1).transpose(1, 2)

    def gather_heads(self, states_1LAD: Tensor) -> Tensor:
        """Exchange states after attention. The input has this rank's heads for all tokens, and the output has all heads
        for this rank's slice (1 x tokens of the slice x heads x head size). Collective: all ranks of the group must
        call this."""
        return self._exchanged(states_1LAD, scattered=1, gathered=2)

    def gather_outputs(self, values_M: Tensor, own_M: Tensor, *, num_tokens: int) -> Tensor:
        """Return the outputs of all ranks for all `num_tokens` completion tokens. `values_M` are this rank's outputs,
        and `own_M` are the indices of their tokens. Only this rank's own outputs receive gradients. Collective: all
        ranks of the group must call this."""
        values_N = values_M.new_zeros(num_tokens, *values_M.shape[1:]).index_copy(0, own_M, values_M.detach())
        dist.all_reduce(values_N, group=self.group)
        return values_N.index_copy(0, own_M, values_M)

    def _exchanged(self, states: Tensor, *, scattered: int, gathered: int) -> Tensor:
        from deepspeed.sequence.layer import _SeqAllToAll  # DeepSpeed's users build on it, despite the underscore

        return cast(Tensor, _SeqAllToAll.apply(self.group, states, scattered, gathered, 0))
