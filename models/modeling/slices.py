"""Slices of a pass: several ranks compute one row of tokens together (DeepSpeed-Ulysses, arXiv 2309.14509, section 3).

Each computes its slice of the row, and in attention its share of the heads over all of the row: one all-to-all of
queries, keys and values leads there, another one back. Gradients of the ranks add up to those of the row.

Shapes: L tokens of a row, S of a slice, H heads, A of one rank in attention, D numbers of a head, N written tokens of
a pass, M of these that states of the slice predict.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch.distributed as dist
from torch import Tensor

from models.modeling.layout import Indexes, SharedRows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class Slicing:
    """This process among the ranks that read the same passes."""

    group: "ProcessGroup"
    size: int
    place: int

    def cut(self, row: SharedRows) -> tuple[SharedRows, Indexes]:
        """Return this rank's slice of a row and which written tokens it predicts (M); attention stays that of all.

        Rows are filled up with tokens at which nobody looks.
        """
        filling = (0, -len(row.tokens_L) % self.size)
        tokens_L, positions_L = np.pad(row.tokens_L, filling), np.pad(row.positions_L, filling)
        width = len(tokens_L) // self.size
        begin = self.place * width
        own_M = np.flatnonzero(row.predicting_N // width == self.place)
        return replace(
            row,
            tokens_L=tokens_L[begin : begin + width],
            positions_L=positions_L[begin : begin + width],
            predicting_N=row.predicting_N[own_M] - begin,
            collected_L=np.pad(row.collected_L, filling),
        ), own_M

    def all_tokens(self, states_1HSD: Tensor) -> Tensor:
        """Give up heads for the other slices' tokens (1 x A x L x D)."""
        return self._exchanged(states_1HSD.transpose(1, 2), scattered=2, gathered=1).transpose(1, 2)

    def all_heads(self, states_1LAD: Tensor) -> Tensor:
        """Give up the other slices' tokens for all heads of this one (1 x S x H x D)."""
        return self._exchanged(states_1LAD, scattered=1, gathered=2)

    def gathered(self, said_M: Tensor, own_M: Tensor, *, written: int) -> Tensor:
        """Say of all written tokens (N) what the ranks said of their own; gradients go to this rank's own alone."""
        said_N = said_M.new_zeros(written, *said_M.shape[1:]).index_copy(0, own_M, said_M.detach())
        dist.all_reduce(said_N, group=self.group)
        return said_N.index_copy(0, own_M, said_M)

    def _exchanged(self, states: Tensor, *, scattered: int, gathered: int) -> Tensor:
        from deepspeed.sequence.layer import _SeqAllToAll  # what its users build on, whatever the underscore says

        return cast(Tensor, _SeqAllToAll.apply(self.group, states, scattered, gathered, 0))
