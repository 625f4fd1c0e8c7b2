"""Image placeholders of the supported families of vision-language models: the text that represents an image in a
prompt.

A chat template writes one placeholder token for each image. The model instead reads many image tokens, surrounded by
markers of its family. The functions of this module return the text that replaces a placeholder, given the settings in
the policy's directory. This module does not import torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rheostat.infra.errors import BadInput


class ImageSize(NamedTuple):
    """Width and height in pixels of an image after its EXIF rotation."""

    width: int
    height: int


class ImageTokens(NamedTuple):
    """Image token of a model, and the factor from which the number of image patches in a prompt is computed."""

    token: int
    """ID of the image token. The model replaces the embeddings of these tokens by the outputs of the vision tower."""
    merges: int
    """Number of image patches that the vision tower merges into one output state. There is one image token per
    state."""

    def patches(self, tokens: NDArray[np.int32]) -> int:
        """Return the number of image patches of all images in a tokenized prompt, computed from the number of image
        tokens."""
        return int(np.count_nonzero(tokens == self.token)) * self.merges


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of a vision-language model that are needed to replace image placeholders by image tokens: configuration,
    image processor and tokenizer."""

    config: Any
    """Configuration of the vision-language model (transformers' `PretrainedConfig`)."""
    images: Any
    """Image processor of the vision-language model, from transformers."""
    token: Callable[[int], str]
    """Function that returns the text of a token, given its ID."""

    @property
    def image_token(self) -> str:
        """Text of the image token, whose embeddings the model replaces by the outputs of the vision tower."""
        return self.token(self.config.image_token_id)


ImageText = Callable[[Parts, ImageSize], str]
Setting = int | str | bool
ProcessorArguments = Callable[[Parts], Mapping[str, Setting]]
Merge = Callable[[Parts], int]


@dataclass(frozen=True, slots=True)
class Family:
    """Rules for the image tokens and the image preprocessing of one family of vision-language models."""

    image_text: ImageText
    """Function that returns the text of all tokens that stand for an image of a given size."""
    around: tuple[str, str] = ("", "")
    """Texts that the family's chat template writes before and after an image's placeholder."""
    options: Mapping[str, Setting] = field(default_factory=dict)
    """Options that transformers' processor class of this family passes to its image processor, in addition to the
    settings in the directory."""
    whole: Mapping[str, Setting] = field(default_factory=dict)
    """Options with which the image processor encodes an image as a whole, without splitting it into crops."""
    placeholder: Callable[[Parts], str] = lambda parts: parts.image_token
    """Function that returns the text of the placeholder token, which represents an image before it is replaced by image
    tokens."""
    processor_arguments: ProcessorArguments = lambda parts: {}
    """Function that returns arguments for transformers' processor class of this family. They describe the model, and
    the processor's settings in the directory may lack them."""
    merges: Merge = lambda parts: 1
    """Function that returns the number of image patches that the vision tower merges into one output state."""


def _idefics3_states(parts: Parts) -> int:
    side = parts.config.vision_config.image_size // parts.config.vision_config.patch_size
    return int(side**2 // parts.config.scale_factor**2)


def _idefics3(parts: Parts, size: ImageSize) -> str:
    tokens = parts.image_token * _idefics3_states(parts)
    around = "<fake_token_around_image>"
    _, rows, columns = parts.images.get_number_of_image_patches(size.height, size.width)
    whole = f"{around}<global-img>{tokens}{around}"
    if not rows:
        return whole
    tiles = [[f"{around}<row_{r + 1}_col_{c + 1}>{tokens}" for c in range(columns)] for r in range(rows)]
    return "".join("".join(row) + "\n" for row in tiles) + "\n" + whole


def _llava(parts: Parts, size: ImageSize) -> str:
    vision, image_size = parts.config.vision_config, parts.images.crop_size or parts.images.size
    if "height" not in image_size:
        raise BadInput("preprocessor_config.json sets no image size. Set crop_size, or size with height and width")
    tokens = (image_size["height"] // vision.patch_size) * (image_size["width"] // vision.patch_size)
    has_class_token = vision.model_type == "clip_vision_model"
    tokens += has_class_token - (parts.config.vision_feature_select_strategy == "default")
    return parts.image_token * int(tokens)


def _qwen(parts: Parts, size: ImageSize) -> str:
    patches = parts.images.get_number_of_image_patches(size.height, size.width)
    return parts.image_token * int(patches // parts.images.merge_size**2)


def _gemma3(parts: Parts, size: ImageSize) -> str:
    begin, end = parts.token(parts.config.boi_token_index), parts.token(parts.config.eoi_token_index)
    return f"\n\n{begin}{parts.image_token * parts.config.mm_tokens_per_image}{end}\n\n"


def _gemma3_merges(parts: Parts) -> int:
    tower = parts.config.vision_config
    return int((tower.image_size // tower.patch_size) ** 2 // parts.config.mm_tokens_per_image)


def _internvl(parts: Parts, size: ImageSize) -> str:
    frames = parts.images.get_number_of_image_patches(size.height, size.width, {"crop_to_patches": True})
    return f"<img>{parts.image_token * (parts.config.image_seq_length * frames)}</img>"


_SPLITTING: Final = Family(
    _idefics3,
    whole={"do_image_splitting": False},
    processor_arguments=lambda parts: {"image_seq_len": _idefics3_states(parts)},
    merges=lambda parts: int(parts.config.scale_factor**2),
)
_MROPE: Final = Family(
    _qwen,
    around=("<|vision_start|>", "<|vision_end|>"),
    merges=lambda parts: int(parts.images.merge_size**2),
)

FAMILIES: Final[Mapping[str, Family]] = {
    "gemma3": Family(
        _gemma3,
        options={"do_pan_and_scan": False},
        placeholder=lambda parts: parts.token(parts.config.boi_token_index),
        merges=_gemma3_merges,
    ),
    "idefics3": _SPLITTING,
    "internvl": Family(
        _internvl,
        options={"crop_to_patches": True},
        whole={"crop_to_patches": False},
        merges=lambda parts: round(parts.config.downsample_ratio**-2),
    ),
    "llava": Family(_llava),
    "qwen2_5_vl": _MROPE,
    "qwen2_vl": _MROPE,
    "qwen3_vl": _MROPE,
    "smolvlm": _SPLITTING,
}
"""Rules of each supported family, keyed by the `model_type` in config.json."""
