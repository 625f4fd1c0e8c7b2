"""How a model that sees runs: every distinct image of a pass once through its tower, its states dealt to the rows.

Where images are is the family's: in most models a token's position is its place; in those with multimodal rotary
embeddings an image takes positions in three directions, and fewer than tokens.

Shapes: B rows, T padded width, P tokens of a prompt, S states of images, H hidden size.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from infra.errors import BadInput
from models.records.media import ImageSource
from models.records.model_input import ModelInput
from models.vision.processor import PreparedImage, VisionProcessor

T = TypeVar("T")

PREPARED_BYTES: Final = 1 << 30
"""Prepared images that a worker keeps."""
STATES_BYTES: Final = 1 << 30
"""What a tower that stays as it is said of images, as far as a worker keeps it."""


@dataclass(frozen=True, slots=True)
class ImageStates:
    """What the tower says of one image."""

    states_SH: Tensor
    deep: tuple[Tensor, ...]
    """S x H each: what Qwen3-VL adds behind its first blocks."""
    one_tensor: bool
    """Whether the model takes those of all images as one tensor, or as a list."""
    kind: type[Any]
    """Of the output that the model expects where there are deep ones."""

    @property
    def bytes(self) -> int:
        """Memory that they take."""
        return sum(each.nbytes for each in (self.states_SH, *self.deep))


class Sight:
    """What a model that sees needs beside its weights; it keeps the images that it prepared last.

    Where tower and projector stay as they are (`stays`), each image is read once and alone, so that its states follow
    from it, whatever else is shown; they are kept, too.
    """

    def __init__(self, processor: VisionProcessor, *, source: ImageSource | None = None, stays: bool = False) -> None:
        self.processor = processor
        self.source = source
        self.stays = stays
        self._prepared = _Kept[PreparedImage](PREPARED_BYTES, _size)
        self._states = _Kept[ImageStates](STATES_BYTES, lambda states: states.bytes)

    @property
    def banned(self) -> tuple[int, ...]:
        """Tokens whose probability is 0."""
        return self.processor.banned

    def prepared(self, digest: str) -> PreparedImage:
        """Return an image as the tower reads it. Raises BadInput where the policy cannot see it."""
        return self._prepared.get(digest, self._prepare)

    def states(self, digest: str, model: PreTrainedModel, device: torch.device) -> ImageStates:
        """Return what a tower that stays as it is says of an image."""

        def read(digest: str) -> ImageStates:
            image = self.prepared(digest)
            with torch.no_grad():
                return _read(model, _on_device([image], model, device), (image.tokens,))[0]

        return self._states.get(digest, read)

    def _prepare(self, digest: str) -> PreparedImage:
        assert self.source is not None, "whoever has prompts with images says where these are"
        try:
            return self.processor.prepare(self.source.encoded(digest))
        except ValueError as error:
            raise BadInput(f"image {digest}: {error}") from error


class _Kept(Generic[T]):
    """What was made of images, the latest, up to so many bytes."""

    def __init__(self, bytes_: int, size: Callable[[T], int]) -> None:
        self._limit, self._size, self._bytes = bytes_, size, 0
        self._found: OrderedDict[str, T] = OrderedDict()

    def get(self, digest: str, make: Callable[[str], T]) -> T:
        """Return what was made of an image, or make it."""
        if digest not in self._found:
            self._found[digest] = made = make(digest)
            self._bytes += self._size(made)
            while self._bytes > self._limit and len(self._found) > 1:
                self._bytes -= self._size(self._found.popitem(last=False)[1])
        self._found.move_to_end(digest)
        return self._found[digest]


def _size(image: PreparedImage) -> int:
    return sum(array.nbytes for array in image.arrays.values())


def without(logits: Tensor, banned: Sequence[int]) -> Tensor:
    """Take tokens out of the distribution, before any softmax."""
    if not banned:
        return logits
    return logits.index_fill(-1, torch.tensor(banned, device=logits.device), -torch.inf)


@dataclass(frozen=True, slots=True)
class SeenRows:
    """What the rows of a pass show, on the device of a model, and where their tokens are."""

    arrays: Mapping[str, Tensor]
    """The distinct images, one behind the other; of rows without any a blank one. None where states are known."""
    known: tuple[ImageStates, ...]
    """What a tower that stays as it is says of the distinct images."""
    sizes: tuple[int, ...]
    """States of each distinct image."""
    dealt: tuple[int, ...]
    """The distinct image at each place for one, row after row; none where the blank one is all there is."""
    positions: Tensor
    """B x T, or 3 x B x T."""
    offsets_B: Tensor
    """What to add to a row's number of tokens for the position of the next one."""
    image_BT: Tensor
    """Which tokens are places for states."""


def look(
    sight: Sight,
    model: PreTrainedModel,
    inputs: Sequence[ModelInput],
    *,
    device: torch.device,
    width: int,
    pads_left: bool = False,
    runs_always: bool = False,
) -> SeenRows:
    """Prepare what rows show, padded to a width on one side; `runs_always` gives those without images a blank one."""
    digests = list(dict.fromkeys(digest for each in inputs for digest in each.images))
    images = [sight.prepared(digest) for digest in digests]
    stays = tuple(sight.states(digest, model, device) for digest in digests) if sight.stays else ()
    read = [] if sight.stays else images or ([sight.processor.blank()] if runs_always else [])
    shape = (max(1, len(inputs)), width)
    positions_3BT, image_BT = np.zeros((3, *shape), np.int64), np.zeros(shape, np.bool_)
    offsets_B = np.zeros(shape[0], np.int64)
    positions_3BT[:, len(inputs) :] = np.arange(width)
    known: dict[tuple[bytes, tuple[str, ...]], tuple[Any, int]] = {}
    for row, each in enumerate(inputs):
        prompt, length = each.prompt, len(each)
        name = (prompt.tobytes(), each.images)
        if name not in known:
            known[name] = _prompt_positions(sight, model, each)
        positions_3P, offset = known[name]
        begin = width - length if pads_left else 0
        part = slice(begin, begin + length)
        rest = np.arange(len(prompt), length if pads_left else width) + offset
        positions_3BT[:, row, begin : begin + len(prompt)] = positions_3P
        positions_3BT[:, row, begin + len(prompt) : begin + len(prompt) + len(rest)] = rest
        image_BT[row, part][: len(prompt)] = prompt == sight.processor.image_id
        offsets_B[row] = offset
    positions = torch.from_numpy(positions_3BT if _is_mrope(model) else positions_3BT[0]).to(device)
    return SeenRows(
        arrays=_on_device(read, model, device),
        known=stays,
        sizes=tuple(image.tokens for image in images),
        dealt=tuple(digests.index(digest) for each in inputs for digest in each.images),
        positions=positions,
        offsets_B=torch.from_numpy(offsets_B).to(device),
        image_BT=torch.from_numpy(image_BT).to(device),
    )


def _prompt_positions(sight: Sight, model: PreTrainedModel, each: ModelInput) -> tuple[Any, int]:
    """Positions of a prompt's tokens in three directions, and how far behind their number the next one is."""
    prompt = each.prompt
    if not each.images or not _is_mrope(model):
        return np.arange(len(prompt)), 0
    tokens_1P = torch.from_numpy(prompt.astype(np.int64))[None]
    grids = [torch.from_numpy(sight.prepared(digest).arrays["image_grid_thw"]) for digest in each.images]
    positions_31P, offset = model.base_model.get_rope_index(
        tokens_1P,
        mm_token_type_ids=(tokens_1P == sight.processor.image_id).int(),
        image_grid_thw=torch.cat(grids),
    )
    return positions_31P[:, 0].numpy(), int(offset)


def _on_device(images: Sequence[PreparedImage], model: PreTrainedModel, device: torch.device) -> dict[str, Tensor]:
    if not images:
        return {}
    takes = inspect.signature(model.base_model.get_image_features).parameters
    arrays = {
        name: torch.from_numpy(np.concatenate([image.arrays[name] for image in images])).to(device)
        for name in images[0].arrays
        if name in takes
    }
    # Families that mask pixels take the frames of a batch of prompts: here of one.
    return {name: array[None] for name, array in arrays.items()} if "pixel_attention_mask" in takes else arrays


@dataclass(frozen=True, slots=True)
class SeenStates:
    """What the tower says."""

    options: dict[str, Any]
    """For the forward pass of a model, beside tokens and mask."""
    nothing: Tensor | None
    """0, of the blank image's states, which takes part in the gradient; none where an image is shown."""


def see(model: PreTrainedModel, rows: SeenRows) -> SeenStates:
    """Run the tower over the distinct images of a pass, and deal what it says to the rows."""
    options: dict[str, Any] = {"position_ids": rows.positions}
    if "token_type_ids" in inspect.signature(model.base_model.forward).parameters:
        options["token_type_ids"] = rows.image_BT.long()  # tokens of an image attend to each other both ways
    if not rows.arrays and not rows.known:
        return SeenStates(options, None)
    if not rows.dealt:
        [blank] = _read(model, rows.arrays, None)
        said = [blank.states_SH, *blank.deep]
        return SeenStates(options, torch.stack([each.float().sum() for each in said]).sum() * 0)
    said_I = rows.known or _read(model, rows.arrays, rows.sizes)
    one, dealt = said_I[0], [said_I[image] for image in rows.dealt]
    states = [each.states_SH for each in dealt]
    output = one.kind() if one.deep else BaseModelOutputWithPooling()
    output.pooler_output = torch.cat(states)[None] if one.one_tensor else states
    if one.deep:
        output.deepstack_features = [[each.deep[level] for each in dealt] for level in range(len(one.deep))]
    options["mm_encoder_outputs"] = {"image": output}
    return SeenStates(options, None)


def _read(model: PreTrainedModel, arrays: Mapping[str, Tensor], sizes: Sequence[int] | None) -> tuple[ImageStates, ...]:
    """Run the tower over images of so many states each; over one image where their number does not matter."""
    found = model.base_model.get_image_features(**arrays, return_dict=True)
    said = [_flat(each) for each in (found.pooler_output, *(getattr(found, "deepstack_features", None) or []))]
    if sizes is not None and len(said[0]) != sum(sizes):
        raise BadInput(
            f"images of {sum(sizes)} tokens became {len(said[0])} states: the image processor's settings are "
            "not those of the model"
        )
    parts = zip(*(torch.split(each, len(each) if sizes is None else list(sizes)) for each in said), strict=True)
    one_tensor = isinstance(found.pooler_output, Tensor)
    return tuple(ImageStates(first, tuple(deep), one_tensor, type(found)) for first, *deep in parts)


def _flat(said: Any) -> Tensor:  # noqa: ANN401 -- a tensor of all images, or one of each
    states = said if isinstance(said, Tensor) else torch.cat(list(said))
    return states.flatten(0, -2)


def reads_in_line(model: PreTrainedModel) -> bool:
    """Whether images are to a model what text is: each token's position is its place, and none looks ahead."""
    looks_ahead = "token_type_ids" in inspect.signature(model.base_model.forward).parameters and _sees(model)
    return not _is_mrope(model) and not looks_ahead


def _sees(model: PreTrainedModel) -> bool:
    return hasattr(model.base_model, "get_image_features")


def _is_mrope(model: PreTrainedModel) -> bool:
    return hasattr(model.base_model, "get_rope_index")
