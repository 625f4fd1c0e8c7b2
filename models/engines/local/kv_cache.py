"""KV cache that appends tokens in place.

The cache layers of transformers copy their whole contents to append one token. The layers of this module copy only once
every `ROOM` steps.

Shapes: B rows, N replaced rows, H heads, T tokens, D values of a head.
"""

from typing import Final

from torch import Tensor
from transformers import Cache, DynamicLayer

ROOM: Final = 64  # spare tokens per row, which bounds the unused memory; copying costs 1/64 of what attention reads


class InPlaceLayer(DynamicLayer):  # type: ignore[misc]
    """KV-cache layer that takes over the contents of a transformers `DynamicLayer` and reserves memory for more tokens.
    Attention receives views of exactly the tokens that are present, so shapes and sums are those of the original layer.
    """

    keys: Tensor
    values: Tensor
    _rooms: tuple[Tensor, Tensor]

    def __init__(self, layer: DynamicLayer) -> None:
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        self._hold(layer.keys, layer.values)

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write new keys and values into the reserved memory and return all keys and values."""
        begin = self.get_seq_length()
        end = begin + key_states.shape[-2]
        if end > self._rooms[0].shape[-2]:
            self._rooms = _enlarge(self.keys, end + ROOM - 1), _enlarge(self.values, end + ROOM - 1)
        for room_BHTD, new_BHTD in zip(self._rooms, (key_states, value_states), strict=True):
            room_BHTD[:, :, begin:end] = new_BHTD
        self.keys, self.values = (room_BHTD[:, :, :end] for room_BHTD in self._rooms)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep only the rows at the indices `beam_idx`. Memory for further tokens is reserved again when the next token
        arrives."""
        self._hold(self.keys.index_select(0, beam_idx), self.values.index_select(0, beam_idx))

    def trim(self, width: int) -> None:
        """Keep only the last `width` tokens of every row, to remove padding on the left."""
        self._hold(self.keys[:, :, -width:], self.values[:, :, -width:])

    def join(self, other: "InPlaceLayer", width: int) -> None:
        """Append the rows of another layer. Both layers are cut or padded on the left to `width` tokens per row."""
        self._hold(_join(self.keys, other.keys, width), _join(self.values, other.values, width))

    def replace(self, rows_N: Tensor, other: "InPlaceLayer") -> None:
        """Overwrite the rows at the indices `rows_N` with those of another layer, aligned on the right. The other layer
        must not be wider. To the left of its tokens, the old values stay and count as padding."""
        for mine_BHTD, new_NHTD in ((self.keys, other.keys), (self.values, other.values)):
            mine_BHTD[rows_N, :, mine_BHTD.shape[-2] - new_NHTD.shape[-2] :] = new_NHTD

    def _hold(self, keys_BHTD: Tensor, values_BHTD: Tensor) -> None:
        self.keys, self.values = self._rooms = keys_BHTD, values_BHTD


def _enlarge(old_BHTD: Tensor, tokens: int) -> Tensor:
    rows, heads, _, numbers = old_BHTD.shape
    room_BHTD = old_BHTD.new_empty(rows, heads, tokens, numbers)
    room_BHTD[:, :, : old_BHTD.shape[-2]] = old_BHTD
    return room_BHTD


def _join(old_BHTD: Tensor, other_BHTD: Tensor, width: int) -> Tensor:
    rows, heads, _, numbers = old_BHTD.shape
    joined_BHTD = old_BHTD.new_zeros(rows + len(other_BHTD), heads, width, numbers)  # padding must be finite
    for part_BHTD, from_BHTD in ((joined_BHTD[:rows], old_BHTD), (joined_BHTD[rows:], other_BHTD)):
        tokens = min(width, from_BHTD.shape[-2])
        part_BHTD[:, :, width - tokens :] = from_BHTD[:, :, from_BHTD.shape[-2] - tokens :]
    return joined_BHTD


def use_in_place_layers(cache: Cache) -> None:
    """Replace the layers of a KV cache that grow with every token by layers with reserved memory (`InPlaceLayer`).
    Other kinds, such as sliding windows and recurrent states, stay as they are."""
    cache.layers = [
        InPlaceLayer(layer) if type(layer) is DynamicLayer and layer.is_initialized else layer  # shared layers are not
        for layer in cache.layers
    ]


def is_in_place(cache: Cache) -> bool:
    """Return whether every layer of a KV cache is an `InPlaceLayer`, so that rows can be added with `join_in_place`."""
    return all(type(layer) is InPlaceLayer for layer in cache.layers)


def join_in_place(cache: Cache, other: Cache, width: int) -> None:
    """Append the rows of the cache `other` to those of `cache`. All rows are then `width` tokens wide and aligned on
    the right."""
    for layer, joining in zip(cache.layers, other.layers, strict=True):
        layer.join(joining, width)


def replace_in_place(cache: Cache, rows_N: Tensor, other: Cache) -> None:
    """Overwrite the rows of `cache` at the indices `rows_N` with the rows of `other`, which must not be wider."""
    for layer, new in zip(cache.layers, other.layers, strict=True):
        layer.replace(rows_N, new)


def trim_in_place(cache: Cache, width: int) -> None:
    """Keep only the last `width` tokens of every row of a KV cache. Every layer must be an `InPlaceLayer`."""
    for layer in cache.layers:
        layer.trim(width)
