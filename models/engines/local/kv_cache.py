"""Keys and values of a batch, written where they stay.

The own layers of transformers copy all that they hold at every step, to append one token; these do once in `ROOM`
steps. B rows, H heads, T tokens, D numbers of a head.
"""

from typing import Final

from torch import Tensor
from transformers import Cache, DynamicLayer

ROOM: Final = 64  # tokens of room, thus what a row may hold in vain; copying is then 1/64 of what attention reads


class InPlaceLayer(DynamicLayer):  # type: ignore[misc]
    """Takes over what a growing layer holds, and has room behind it.

    Attention sees views of exactly the tokens that there are: the shapes, and so the sums, are those of the layer
    taken over.
    """

    keys: Tensor
    values: Tensor
    _rooms: tuple[Tensor, Tensor]

    def __init__(self, grown: DynamicLayer) -> None:
        super().__init__()
        self.lazy_initialization(grown.keys, grown.values)
        self._hold(grown.keys, grown.values)

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write the tokens into the room and return all that is held."""
        begin = self.get_seq_length()
        end = begin + key_states.shape[-2]
        if end > self._rooms[0].shape[-2]:
            self._rooms = _roomy(self.keys, end + ROOM - 1), _roomy(self.values, end + ROOM - 1)
        for room_BHTD, new_BHTD in zip(self._rooms, (key_states, value_states), strict=True):
            room_BHTD[:, :, begin:end] = new_BHTD
        self.keys, self.values = (room_BHTD[:, :, :end] for room_BHTD in self._rooms)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these rows; the next token finds them new room."""
        self._hold(self.keys.index_select(0, beam_idx), self.values.index_select(0, beam_idx))

    def trim(self, width: int) -> None:
        """Keep the last `width` tokens."""
        self._hold(self.keys[:, :, -width:], self.values[:, :, -width:])

    def join(self, other: "InPlaceLayer", width: int) -> None:
        """Put the rows of another layer behind those here, with the last `width` tokens of each, or padding before."""
        self._hold(_joined(self.keys, other.keys, width), _joined(self.values, other.values, width))

    def _hold(self, keys_BHTD: Tensor, values_BHTD: Tensor) -> None:
        self.keys, self.values = self._rooms = keys_BHTD, values_BHTD


def _roomy(held_BHTD: Tensor, tokens: int) -> Tensor:
    rows, heads, _, numbers = held_BHTD.shape
    room_BHTD = held_BHTD.new_empty(rows, heads, tokens, numbers)
    room_BHTD[:, :, : held_BHTD.shape[-2]] = held_BHTD
    return room_BHTD


def _joined(held_BHTD: Tensor, other_BHTD: Tensor, width: int) -> Tensor:
    rows, heads, _, numbers = held_BHTD.shape
    joined_BHTD = held_BHTD.new_zeros(rows + len(other_BHTD), heads, width, numbers)  # padding must be finite
    for part_BHTD, from_BHTD in ((joined_BHTD[:rows], held_BHTD), (joined_BHTD[rows:], other_BHTD)):
        tokens = min(width, from_BHTD.shape[-2])
        part_BHTD[:, :, width - tokens :] = from_BHTD[:, :, from_BHTD.shape[-2] - tokens :]
    return joined_BHTD


def hold_in_place(cache: Cache) -> None:
    """Take over the layers that grow by every token; sliding windows, states and other kinds stay as they are."""
    cache.layers = [
        InPlaceLayer(layer) if type(layer) is DynamicLayer and layer.is_initialized else layer  # shared ones are not
        for layer in cache.layers
    ]


def is_in_place(cache: Cache) -> bool:
    """Whether every layer is held in place, so that rows of another such cache can join."""
    return all(type(layer) is InPlaceLayer for layer in cache.layers)


def join_in_place(cache: Cache, other: Cache, width: int) -> None:
    """Put the rows of another cache behind those of this one, all `width` tokens wide and aligned on the right."""
    for layer, joining in zip(cache.layers, other.layers, strict=True):
        layer.join(joining, width)


def trim_in_place(cache: Cache, width: int) -> None:
    """Keep the last `width` tokens of a cache whose layers are all held in place."""
    for layer in cache.layers:
        layer.trim(width)
