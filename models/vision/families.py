"""How families of vision-language models write an image in a prompt. Torch-free.

A template puts one token where an image is to be seen; the model reads as many as it makes of the image, with what its
family writes around them. Each function here spells that, from the directory's own settings.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from infra.errors import BadInput


class ImageSize(NamedTuple):
    """Pixels of an image, as it is shown."""

    width: int
    height: int


class ImageTokens(NamedTuple):
    """What tells from the tokens of a prompt how much the tower reads for it."""

    token: int
    """The one that the tower's states take the place of."""
    merges: int
    """Patches that become one state."""

    def patches(self, tokens: NDArray[np.int32]) -> int:
        """Count the patches of the images in a prompt."""
        return int(np.count_nonzero(tokens == self.token)) * self.merges


@dataclass(frozen=True, slots=True)
class Parts:
    """What a directory says of images."""

    config: Any
    """Of the model."""
    images: Any
    """The image processor of transformers."""
    token: Callable[[int], str]
    """Spells a token of the vocabulary."""

    @property
    def image_token(self) -> str:
        """The token that the tower's states take the place of."""
        return self.token(self.config.image_token_id)


Speller = Callable[[Parts, ImageSize], str]
Setting = int | str | bool
Told = Callable[[Parts], Mapping[str, Setting]]
Merge = Callable[[Parts], int]


@dataclass(frozen=True, slots=True)
class Family:
    """How a family writes an image, and prepares it."""

    spell: Speller
    around: tuple[str, str] = ("", "")
    """What its template writes before and after the place of an image."""
    options: Mapping[str, Setting] = field(default_factory=dict)
    """What its own processor asks the image processor for, beside the settings in the directory."""
    whole: Mapping[str, Setting] = field(default_factory=dict)
    """What keeps the image processor from cutting an image into parts."""
    place: Callable[[Parts], str] = lambda parts: parts.image_token
    """The token that stands for an image before it is written out."""
    told: Told = lambda parts: {}
    """What its own processor must be told of the model, as the directory need not say it."""
    merges: Merge = lambda parts: 1
    """How many patches of an image, which the tower reads, become one state."""


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
    cut = [[f"{around}<row_{r + 1}_col_{c + 1}>{tokens}" for c in range(columns)] for r in range(rows)]
    return "".join("".join(row) + "\n" for row in cut) + "\n" + whole


def _llava(parts: Parts, size: ImageSize) -> str:
    vision, shown = parts.config.vision_config, parts.images.crop_size or parts.images.size
    if "height" not in shown:
        raise BadInput("preprocessor_config.json: expected crop_size, or size with height and width: an image's tokens")
    tokens = (shown["height"] // vision.patch_size) * (shown["width"] // vision.patch_size)
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
    told=lambda parts: {"image_seq_len": _idefics3_states(parts)},
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
        place=lambda parts: parts.token(parts.config.boi_token_index),
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
"""By the `model_type` of config.json."""
