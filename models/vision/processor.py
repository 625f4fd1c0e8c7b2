"""Preparation of images for a vision-language policy: the image tokens of a prompt, and the pixel arrays.

The image processor of transformers computes the pixels, always with PIL, so that they are the same on every machine.
The text processors of transformers are not used. This module does not import torch itself.
"""

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer

from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput
from rheostat.models.vision.color_conversion import decode_rgb
from rheostat.models.vision.families import FAMILIES, Family, ImageSize, ImageTokens, Parts, Setting

SETTINGS: Final = ("preprocessor_config.json", "processor_config.json")
BACKEND: Final = "pil"
"""Backend of transformers' image processors. Without this setting, transformers would use torchvision if it is
installed, which computes slightly different pixels."""
_MEDIA_TOKENS: Final = ("image_token_id", "video_token_id", "audio_token_id", "boi_token_index")
"""Keys of config.json that contain IDs of tokens for images, videos or audio."""


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """Input arrays of the vision tower for one image. The names of the arrays depend on the family of models."""

    arrays: Mapping[str, NDArray[Any]]
    """Arrays, keyed by argument names of the model. Each has one or more rows per image, because an image may consist
    of several frames or patches."""
    tokens: int
    """Number of image tokens of the image, which equals the number of states that the vision tower returns for it."""


class VisionProcessor:
    """Converter that turns images into prompt tokens and pixel arrays, for one vision-language policy."""

    def __init__(self, family: Family, parts: Parts, tokenizer: Tokenizer, *, ends: Set[int] = frozenset()) -> None:
        """Initialize the converter. `parts` are the model's configuration and image processor, and `ends` are the IDs
        of the tokens that end a completion."""
        self._family = family
        self._parts = parts
        self._tokenizer = tokenizer
        self._ends = ends
        self._spelt: dict[str, list[int]] = {}
        self.placeholder = family.placeholder(parts)
        """Text of the placeholder token, which represents one image in a prompt until `expand` replaces it."""
        self.shown = self.placeholder.join(family.around)
        """Text that represents one image in a prompt without a chat template: the placeholder, with the family's
        markers around it."""
        self.place_id = cast(int, tokenizer.token_to_id(self.placeholder))
        self.image_id: int = parts.config.image_token_id
        """ID of the image token in the output of `expand`. The model replaces the embeddings of these tokens by outputs
        of the vision tower."""

    @property
    def image_tokens(self) -> ImageTokens:
        """Image token of the model, and the factor from which the number of image patches in a prompt is computed."""
        return ImageTokens(self.image_id, self._family.merges(self._parts))

    @cached_property
    def banned(self) -> tuple[int, ...]:
        """IDs of the tokens that the policy must never generate, in ascending order. Their probability is set to 0.

        They are the tokens for images, videos and audio, and the padding token unless it ends completions.
        """
        config = self._parts.config
        named = {getattr(config, name, None) for name in _MEDIA_TOKENS}
        named.add(config.get_text_config().pad_token_id)
        return tuple(sorted(token for token in named if token is not None and token not in self._ends))

    def expand(self, tokens: Sequence[int], sizes: Sequence[ImageSize]) -> list[int]:
        """Replace each image placeholder in a prompt by all tokens that stand for the image. `sizes` are the sizes of
        the images in the order of their placeholders. Raises ValueError if the number of placeholders differs from the
        number of images."""
        places = [at for at, token in enumerate(tokens) if token == self.place_id]
        if len(places) != len(sizes):
            raise ValueError(
                f"the prompt contains the placeholder {self.placeholder} {format_count(len(places), 'time')}, but it "
                f"has {format_count(len(sizes), 'image')}. The numbers must be equal"
            )
        expanded: list[int] = []
        begin = 0
        for at, size in zip(places, sizes, strict=True):
            self._append(expanded, tokens[begin:at])
            self._append(expanded, self.encode_image(size))
            begin = at + 1
        self._append(expanded, tokens[begin:])
        return expanded

    def collapse(self, tokens: Sequence[int], sizes: Sequence[ImageSize]) -> list[int]:
        """Replace the tokens of each image in a prompt by one placeholder, which is the inverse of `expand`. Raises
        ValueError if the tokens of an image are incomplete, or the images are not in the order of `sizes`."""
        collapsed: list[int] = []
        begin = 0
        for size in sizes:
            image_tokens = self.encode_image(size)
            starts = (at for at in range(begin, len(tokens)) if tokens[at] == image_tokens[0])
            at = next((at for at in starts if [*tokens[at : at + len(image_tokens)]] == image_tokens), None)
            if at is None:
                raise ValueError(
                    f"after token {begin}, which begins an image, the prompt must contain the {len(image_tokens)} "
                    "tokens of the image, but other tokens follow"
                )
            collapsed += [*tokens[begin:at], self.place_id]
            begin = at + len(image_tokens)
        return [*collapsed, *tokens[begin:]]

    @property
    def processor_arguments(self) -> dict[str, Setting]:
        """Arguments with which transformers' processor class of this family computes the same tokens and pixels as this
        converter."""
        return {"backend": BACKEND, **self._family.processor_arguments(self._parts), **self._family.options}

    def encode_image(self, size: ImageSize) -> list[int]:
        """Return the IDs of all tokens that stand for an image of this size, including the family's markers."""
        text = self._family.image_text(self._parts, size)
        if text not in self._spelt:
            self._spelt[text] = self._encode(text)
        return self._spelt[text]

    def count_tokens(self, size: ImageSize) -> int:
        """Return the number of image tokens for an image of this size, which equals the number of states from the
        vision tower."""
        return self.encode_image(size).count(self.image_id)

    def prepare(self, encoded: bytes) -> PreparedImage:
        """Decode an image and compute the input arrays of the vision tower. Raises ValueError if the bytes are not an
        image, or if all values of a frame would be 0, because the model would treat the frame as padding."""
        image = decode_rgb(encoded)
        return self._prepare_image(image, tokens=self.count_tokens(ImageSize(*image.size)), options={})

    def check(self, encoded: bytes) -> None:
        """Raise ValueError if a frame of the image would become 0 in all channels, because the model would treat it as
        padding. Returns at once if this cannot happen under the policy's settings, which is the usual case."""
        if self._makes_zeros:
            self.prepare(encoded)

    def build_blank(self) -> PreparedImage:
        """Return a small white image. In micro-batches without images the vision tower processes this image, because
        the tower's parameters need a gradient on every rank."""
        return self._prepare_image(Image.new("RGB", (64, 64), (255, 255, 255)), tokens=0, options=self._family.whole)

    def _prepare_image(self, image: Image.Image, *, tokens: int, options: Mapping[str, object]) -> PreparedImage:
        options = {**self._family.options, **options, "return_tensors": "np"}
        names = self._parts.images.model_input_names
        outputs = self._parts.images(images=[image], **options)
        arrays = {name: np.asarray(outputs[name]) for name in names if name in outputs}
        pixels = arrays["pixel_values"]
        if pixels.ndim == 5:  # one row of frames for each image of a batch
            arrays = {name: array[0] for name, array in arrays.items()}
            if any(not frame.any() for frame in arrays["pixel_values"]):
                raise ValueError(
                    "every pixel of the image is 0 after normalization, so the model would treat the image as "
                    "padding. Use another image"
                )
        return PreparedImage(arrays, tokens)

    def _append(self, expanded: list[int], more: Sequence[int]) -> None:
        """Append the tokens `more` to `expanded`. Newline tokens on both sides of the boundary are encoded again as one
        run, as the tokenizer would encode them."""
        begin, end = len(expanded), 0
        while begin and expanded[begin - 1] in self._newlines:
            begin -= 1
        while end < len(more) and more[end] in self._newlines:
            end += 1
        if begin < len(expanded) and end:
            run = sum(self._newlines[token] for token in (*expanded[begin:], *more[:end]))
            expanded[begin:] = self._encode("\n" * run)
            more = more[end:]
        expanded += more

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return tokens

    @cached_property
    def _makes_zeros(self) -> bool:
        """Whether preprocessing may turn a frame of one color into zeros in all channels, in a family that treats such
        frames as padding."""
        images = self._parts.images
        if "pixel_attention_mask" not in images.model_input_names:
            return False
        factor = images.rescale_factor if images.do_rescale else 1.0
        means = images.image_mean if images.do_normalize else [0.0]
        return all(np.isclose(np.arange(256) * factor, mean, atol=1e-6).any() for mean in means)

    @cached_property
    def _newlines(self) -> dict[int, int]:
        """Number of newlines in each token that consists only of newlines, by token ID. Byte-level vocabularies write a
        newline as Ċ."""
        return {
            token: len(text) for text, token in self._tokenizer.get_vocab().items() if text and not text.strip("\nĊ")
        }


def load_processor(directory: Path) -> VisionProcessor | None:
    """Load the image converter of a policy's directory. Return None if the policy is text-only.

    Raises BadInput if the settings of the image processor are missing or invalid, or if the tokenizer lacks the image
    tokens in config.json.
    """
    kind = _kind(directory)
    if kind not in FAMILIES:
        return None  # other checks report a directory that is not a model at all
    if not any((directory / name).is_file() for name in SETTINGS):
        raise BadInput(
            f"policy {directory}: a {kind} reads images, so the directory must contain {' or '.join(SETTINGS)}, but "
            "neither exists. Copy the file from the original model"
        )
    from transformers import AutoConfig, AutoImageProcessor

    try:
        config = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        images = AutoImageProcessor.from_pretrained(
            str(directory), backend=BACKEND, local_files_only=True, trust_remote_code=False
        )
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # the tokenizers library raises plain Exception
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise BadInput(
            f"policy {directory}: the image processor cannot be loaded: {first}. Use a complete copy of the model"
        ) from error
    return _build_processor(
        FAMILIES[kind], Parts(config, images, lambda token: str(tokenizer.id_to_token(token))), tokenizer, directory
    )


def is_vision_model(directory: Path) -> bool:
    """Return whether the directory contains a vision-language model of a supported family."""
    return _kind(directory) in FAMILIES


def _kind(directory: Path) -> str:
    return str(_settings(directory / "config.json").get("model_type"))


def _build_processor(family: Family, parts: Parts, tokenizer: Tokenizer, directory: Path) -> VisionProcessor:
    """Build the image converter of a model family. Raises BadInput if the tokenizer lacks an image token that
    config.json names."""
    for name in ("image_token_id", "boi_token_index"):
        token = getattr(parts.config, name, None)
        if token is not None and tokenizer.id_to_token(token) is None:
            raise BadInput(
                f"policy {directory}: config.json sets {name} = {token}, but the tokenizer has no such token. Take "
                "config.json and the tokenizer from the same checkpoint"
            )
    return VisionProcessor(family, parts, tokenizer, ends=_read_end_tokens(directory, tokenizer))


def _read_end_tokens(directory: Path, tokenizer: Tokenizer) -> set[int]:
    """Return the IDs of the tokens that end a completion, according to the tokenizer and the directory's
    generation_config.json."""
    named = _settings(directory / "tokenizer_config.json").get("eos_token")
    content = named.get("content") if isinstance(named, dict) else named
    stated = _settings(directory / "generation_config.json").get("eos_token_id")
    ends = {*(stated if isinstance(stated, list) else [stated]), tokenizer.token_to_id(str(content))}
    return {token for token in ends if isinstance(token, int)}


def _settings(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}
