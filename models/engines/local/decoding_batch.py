"""Batch of rows that are decoded together: their positions, their padding and their KV cache.

Shapes: B rows of the batch, N rows that replace finished ones.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache

from rheostat.models.engines.local.kv_cache import join_in_place, replace_in_place, trim_in_place


@dataclass(slots=True)
class DecodingBatch:
    """State of the batch that is being decoded, with one row per completion. Finished rows are marked as not `alive`,
    and are removed once enough rows have finished."""

    rows_B: Tensor
    alive_B: Tensor
    width: int
    """Number of tokens of each row in the KV cache, including padding."""
    padding_B: Tensor
    """Number of padding tokens of each row in the KV cache. Padding is on the left."""
    lengths_B: Tensor
    """Number of tokens of each row in the KV cache, without padding. Without images this is also the position of the
    next token. The number does not change any more once the row has finished."""
    offsets_B: Tensor
    """Offset that is added to each row's next position, because an image may take fewer positions than tokens."""
    cache: Cache

    def keep_alive(self) -> None:
        keep_B = self.alive_B.nonzero().squeeze(1)
        self.rows_B, self.padding_B, self.lengths_B, self.offsets_B = (
            row_data[keep_B] for row_data in (self.rows_B, self.padding_B, self.lengths_B, self.offsets_B)
        )
        self.alive_B = self.alive_B[keep_B]
        self.cache.reorder_cache(keep_B)

    def trim(self) -> None:
        """Remove the leftmost entries of the KV cache that contain only padding."""
        width = int(self.lengths_B.max())
        trim_in_place(self.cache, width)
        self.padding_B = self.padding_B + (width - self.width)
        self.width = width

    def replace_finished(self, new: "DecodingBatch") -> Tensor:
        """Put the rows of `new`, which must not be wider, in the places of finished rows. Returns the places."""
        places_N = (~self.alive_B).nonzero().squeeze(1)[: len(new.rows_B)]
        replace_in_place(self.cache, places_N, new.cache)
        self.padding_B[places_N] = new.padding_B + (self.width - new.width)
        self.rows_B[places_N], self.alive_B[places_N] = new.rows_B, new.alive_B
        self.lengths_B[places_N], self.offsets_B[places_N] = new.lengths_B, new.offsets_B
        return places_N

    def admit(self, new: "DecodingBatch") -> None:
        """Append the rows of `new`, which must be unfinished, to the batch. Cache entries that contain only padding are
        removed."""
        width = max(int(self.lengths_B.max()), new.width)
        join_in_place(self.cache, new.cache, width)
        self.padding_B = torch.cat([self.padding_B + (width - self.width), new.padding_B + (width - new.width)])
        self.rows_B, self.alive_B = torch.cat([self.rows_B, new.rows_B]), torch.cat([self.alive_B, new.alive_B])
        self.lengths_B = torch.cat([self.lengths_B, new.lengths_B])
        self.offsets_B = torch.cat([self.offsets_B, new.offsets_B])
        self.width = width
