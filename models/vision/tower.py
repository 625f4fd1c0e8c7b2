"""Images in forward passes: the vision tower encodes each distinct image of a batch once, for all rows that contain it.

The positions of image tokens depend on the model family. In most models the position of a token is its index. In models
with multimodal rotary embeddings (M-RoPE) an image has positions in three dimensions, and uses up fewer positions than
it has tokens.

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

from rheostat.infra.errors import BadInput
from rheostat.models.records.media import ImageSource
from rheostat.models.records.model_input import ModelInput
from rheostat.models.vision.processor import PreparedImage, VisionProcessor

T = TypeVar("T")

PREPARED_BYTES: Final = 1 << 30
"""Maximum total size, in bytes, of the preprocessed images that a worker caches."""
STATES_BYTES: Final = 1 << 30
"""Maximum total size, in bytes, of the cached outputs of a frozen vision tower."""


@dataclass(frozen=True, slots=True)
class ImageStates:
    """Outputs of the vision tower and projector for one image."""

    states_SH: Tensor
    """States that replace the embeddings of the image's tokens, of shape (image tokens, hidden size)."""
    deep: tuple[Tensor, ...]
    """Additional states of the same shape that Qwen3-VL adds to the hidden states after its first blocks (deepstack).
    Empty for other families."""
    one_tensor: bool
    """Whether the model requires the states of all images in one tensor instead of a list with one tensor per image."""
    kind: type[Any]
    """Class of the vision tower's output. A model that uses deepstack states requires its states in an object of this
    class."""

    @property
    def bytes(self) -> int:
        """Memory size of the states in bytes."""
        return sum(each.nbytes for each in (self.states_SH, *self.deep))


class VisionInputs:
    """Image preprocessing of a worker, with a cache of prepared images. `source` provides the encoded images. If
    `is_frozen` is true, vision tower and projector are not trained.

    A frozen tower encodes each image only once and alone, so that its states do not depend on the other images of a
    batch, and these states are cached too.
    """

    def __init__(
        self, processor: VisionProcessor, *, source: ImageSource | None = None, is_frozen: bool = False
    ) -> None:
        self.processor = processor
        self.source = source
        self.is_frozen = is_frozen
        self._prepared = _BoundedCache[PreparedImage](PREPARED_BYTES, _size)
        self._states = _BoundedCache[ImageStates](STATES_BYTES, lambda states: states.bytes)

    @property
    def banned(self) -> tuple[int, ...]:
        """IDs of the tokens that the policy must never generate, such as image tokens. Their probability is set to
        0."""
        return self.processor.banned

    def prepare(self, digest: str) -> PreparedImage:
        """Return the input arrays of the vision tower for the image with this digest.

        Raises BadInput if the image cannot be decoded, or if the model would treat it as padding.
        """
        return self._prepared.get(digest, self._prepare)

    def states(self, digest: str, model: PreTrainedModel, device: torch.device) -> ImageStates:
        """Return the outputs of the frozen vision tower of `model` for the image with this digest, from the cache if
        possible."""

        def read(digest: str) -> ImageStates:
            image = self.prepare(digest)
            with torch.no_grad():
                return _run_tower(model, _on_device([image], model, device), (image.tokens,))[0]

        return self._states.get(digest, read)

    def _prepare(self, digest: str) -> PreparedImage:
        assert self.source is not None, "prompts with images need an image source"
        try:
            return self.processor.prepare(self.source.encoded(digest))
        except ValueError as error:
            raise BadInput(f"image {digest}: {error}") from error


class _BoundedCache(Generic[T]):
    """Cache of values computed from images. If their total size exceeds a limit in bytes, the least recently used
    values are removed. The last value stays even if it alone exceeds the limit."""

    def __init__(self, bytes_: int, size: Callable[[T], int]) -> None:
        self._limit, self._size, self._bytes = bytes_, size, 0
        self._found: OrderedDict[str, T] = OrderedDict()

    def get(self, digest: str, make: Callable[[str], T]) -> T:
        """Return the cached value for the image with this digest. If there is none, compute it with `make` and cache
        it."""
        if digest not in self._found:
            self._found[digest] = value = make(digest)
            self._bytes += self._size(value)
            while self._bytes > self._limit and len(self._found) > 1:
                self._bytes -= self._size(self._found.popitem(last=False)[1])
        self._found.move_to_end(digest)
        return self._found[digest]


def _size(image: PreparedImage) -> int:
    return sum(array.nbytes for array in image.arrays.values())


def mask_tokens(logits: Tensor, banned: Sequence[int]) -> Tensor:
    """Set the logits of the banned tokens to -inf, so that their probability after a softmax is 0."""
    if not banned:
        return logits
    return logits.index_fill(-1, torch.tensor(banned, device=logits.device), -torch.inf)


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Images of a batch's rows and the positions of the rows' tokens, on the device of the model."""

    arrays: Mapping[str, Tensor]
    """Input arrays of the vision tower for all distinct images, concatenated. They contain a blank image if no row has
    an image and the tower must run. Empty if `states` are given."""
    states: tuple[ImageStates, ...]
    """Outputs of a frozen vision tower for the distinct images. Empty if the tower is trained, because it then runs in
    the forward pass."""
    sizes: tuple[int, ...]
    """Number of vision-tower states (and of image tokens) of each distinct image."""
    image_indices: tuple[int, ...]
    """Index among the distinct images for each image in the rows, in the order of the rows. Empty if no row has an
    image."""
    positions: Tensor
    """Position of each token, of shape (rows, width), or (3, rows, width) for models with multimodal rotary
    embeddings."""
    offsets_B: Tensor
    """Position of the next token of each row minus the number of tokens of the row. An image may take fewer positions
    than tokens."""
    image_BT: Tensor
    """Mask of the image tokens, whose embeddings are replaced by states of the vision tower."""


def prepare_rows(
    vision: VisionInputs,
    model: PreTrainedModel,
    inputs: Sequence[ModelInput],
    *,
    device: torch.device,
    width: int,
    pads_left: bool = False,
    runs_always: bool = False,
) -> ImageRows:
    """Prepare the images and positions of the rows of a batch, padded to `width` tokens on the left or right. If
    `runs_always` is true, a blank image is added to a batch without images, so that the vision tower runs in every
    micro-batch. Raises BadInput if an image cannot be prepared."""
    digests = list(dict.fromkeys(digest for each in inputs for digest in each.images))
    images = [vision.prepare(digest) for digest in digests]
    stays = tuple(vision.states(digest, model, device) for digest in digests) if vision.is_frozen else ()
    read = [] if vision.is_frozen else images or ([vision.processor.build_blank()] if runs_always else [])
    shape = (max(1, len(inputs)), width)
    positions_3BT, image_BT = np.zeros((3, *shape), np.int64), np.zeros(shape, np.bool_)
    offsets_B = np.zeros(shape[0], np.int64)
    positions_3BT[:, len(inputs) :] = np.arange(width)
    known: dict[tuple[bytes, tuple[str, ...]], tuple[Any, int]] = {}
    for row, each in enumerate(inputs):
        prompt, length = each.prompt, len(each)
        name = (prompt.tobytes(), each.images)
        if name not in known:
            known[name] = _prompt_positions(vision, model, each)
        positions_3P, offset = known[name]
        begin = width - length if pads_left else 0
        part = slice(begin, begin + length)
        rest = np.arange(len(prompt), length if pads_left else width) + offset
        positions_3BT[:, row, begin : begin + len(prompt)] = positions_3P
        positions_3BT[:, row, begin + len(prompt) : begin + len(prompt) + len(rest)] = rest
        image_BT[row, part][: len(prompt)] = prompt == vision.processor.image_id
        offsets_B[row] = offset
    positions = torch.from_numpy(positions_3BT if _is_mrope(model) else positions_3BT[0]).to(device)
    return ImageRows(
        arrays=_on_device(read, model, device),
        states=stays,
        sizes=tuple(image.tokens for image in images),
        image_indices=tuple(digests.index(digest) for each in inputs for digest in each.images),
        positions=positions,
        offsets_B=torch.from_numpy(offsets_B).to(device),
        image_BT=torch.from_numpy(image_BT).to(device),
    )


def _prompt_positions(vision: VisionInputs, model: PreTrainedModel, each: ModelInput) -> tuple[Any, int]:
    """Return the positions of a prompt's tokens, and the position of the next token minus the number of tokens. The
    positions have shape (3, tokens) if the prompt has images and the model uses multimodal rotary embeddings, else
    (tokens,)."""
    prompt = each.prompt
    if not each.images or not _is_mrope(model):
        return np.arange(len(prompt)), 0
    tokens_1P = torch.from_numpy(prompt.astype(np.int64))[None]
    grids = [torch.from_numpy(vision.prepare(digest).arrays["image_grid_thw"]) for digest in each.images]
    positions_31P, offset = model.base_model.get_rope_index(
        tokens_1P,
        mm_token_type_ids=(tokens_1P == vision.processor.image_id).int(),
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
    # Families that mask pixels expect the frames of a batch of prompts. The batch here is one prompt.
    return {name: array[None] for name, array in arrays.items()} if "pixel_attention_mask" in takes else arrays


@dataclass(frozen=True, slots=True)
class TowerOutputs:
    """Outputs of the vision tower for a batch, prepared as arguments of the model's forward pass."""

    options: dict[str, Any]
    """Keyword arguments of the model's forward pass, in addition to tokens and attention mask."""
    zero_term: Tensor | None
    """Sum of the blank image's states times 0, or None if there is no blank image. It is added to the hidden states, so
    that the vision tower's parameters get a gradient of 0 in a batch without images."""


def encode_images(model: PreTrainedModel, rows: ImageRows) -> TowerOutputs:
    """Run the vision tower on the distinct images of a batch, and assign its outputs to the rows that contain these
    images."""
    options: dict[str, Any] = {"position_ids": rows.positions}
    if "token_type_ids" in inspect.signature(model.base_model.forward).parameters:
        options["token_type_ids"] = rows.image_BT.long()  # image tokens attend to each other in both directions
    if not rows.arrays and not rows.states:
        return TowerOutputs(options, None)
    if not rows.image_indices:
        [blank] = _run_tower(model, rows.arrays, None)
        said = [blank.states_SH, *blank.deep]
        return TowerOutputs(options, torch.stack([each.float().sum() for each in said]).sum() * 0)
    states_I = rows.states or _run_tower(model, rows.arrays, rows.sizes)
    one, states_of_images = states_I[0], [states_I[image] for image in rows.image_indices]
    states = [each.states_SH for each in states_of_images]
    output = one.kind() if one.deep else BaseModelOutputWithPooling()
    output.pooler_output = torch.cat(states)[None] if one.one_tensor else states
    if one.deep:
        output.deepstack_features = [[each.deep[level] for each in states_of_images] for level in range(len(one.deep))]
    options["mm_encoder_outputs"] = {"image": output}
    return TowerOutputs(options, None)


def _run_tower(
    model: PreTrainedModel, arrays: Mapping[str, Tensor], sizes: Sequence[int] | None
) -> tuple[ImageStates, ...]:
    """Run the vision tower on images, and return the states of each image. `sizes` are the expected numbers of states.
    If it is None, the arrays contain one image with any number of states. Raises BadInput if the number of states
    differs from the sum of `sizes`."""
    features = model.base_model.get_image_features(**arrays, return_dict=True)
    states = [_flat(each) for each in (features.pooler_output, *(getattr(features, "deepstack_features", None) or []))]
    if sizes is not None and len(states[0]) != sum(sizes):
        raise BadInput(
            f"the images of a prompt have {sum(sizes)} tokens, but the vision tower encoded them as {len(states[0])} "
            "states. The settings of the image processor (preprocessor_config.json) do not fit the model."
        )
    parts = zip(*(torch.split(each, len(each) if sizes is None else list(sizes)) for each in states), strict=True)
    one_tensor = isinstance(features.pooler_output, Tensor)
    return tuple(ImageStates(first, tuple(deep), one_tensor, type(features)) for first, *deep in parts)


def _flat(said: Any) -> Tensor:  # noqa: ANN401 -- a tensor of all images, or one of each
    states = said if isinstance(said, Tensor) else torch.cat(list(said))
    return states.flatten(0, -2)


def treats_images_as_text(model: PreTrainedModel) -> bool:
    """Return whether the model handles image tokens like text tokens: each token's position is its index, and attention
    is causal."""
    looks_ahead = "token_type_ids" in inspect.signature(model.base_model.forward).parameters and reads_images(model)
    return not _is_mrope(model) and not looks_ahead


def reads_images(model: PreTrainedModel) -> bool:
    """Return whether a model is a vision-language model."""
    return hasattr(model.base_model, "get_image_features")


def _is_mrope(model: PreTrainedModel) -> bool:
    return hasattr(model.base_model, "get_rope_index")
