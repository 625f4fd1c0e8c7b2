"""What a policy that sees makes of images: the tokens that each takes in a prompt, and its pixels. Torch is left alone.

The image processor of transformers makes the pixels, always with PIL, so that they are the same on every machine; of
its text processors nothing is used.
"""

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from tokenizers import Tokenizer

from infra.errors import BadInput
from models.vision.families import FAMILIES, Family, ImageSize, ImageTokens, Parts, Setting

SETTINGS: Final = ("preprocessor_config.json", "processor_config.json")
BACKEND: Final = "pil"
"""What makes pixels, on every machine; where torchvision is installed it would be that, with other pixels."""
_MEDIA_TOKENS: Final = ("image_token_id", "video_token_id", "audio_token_id", "boi_token_index")
"""Settings of config.json that name a token which stands for something else than text."""


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """An image as the tower reads it; which arrays there are is the family's."""

    arrays: Mapping[str, NDArray[Any]]
    """One or more rows each: several frames or patches may make up an image."""
    tokens: int
    """States that the tower makes of it, which take the places of as many tokens."""


class VisionProcessor:
    """The parts of a directory that turn images into tokens and pixels."""

    def __init__(self, family: Family, parts: Parts, tokenizer: Tokenizer, *, ends: Set[int] = frozenset()) -> None:
        """`ends` are the tokens that end a completion."""
        self._family = family
        self._parts = parts
        self._tokenizer = tokenizer
        self._ends = ends
        self._spelt: dict[str, list[int]] = {}
        self.placeholder = family.place(parts)
        """The token that stands for one image in a text."""
        self.shown = self.placeholder.join(family.around)
        """How a text that is no chat shows one image: the placeholder, and what the family writes around it."""
        self.place_id = cast(int, tokenizer.token_to_id(self.placeholder))
        self.image_id: int = parts.config.image_token_id
        """The token whose places the tower's states take, in what `expand` returns."""

    @property
    def image_tokens(self) -> ImageTokens:
        """What tells how much of a prompt is images."""
        return ImageTokens(self.image_id, self._family.merges(self._parts))

    @cached_property
    def banned(self) -> tuple[int, ...]:
        """Tokens that are no words, which the policy never writes: those of media, and padding where it ends nothing.

        Their probability is 0.
        """
        config = self._parts.config
        named = {getattr(config, name, None) for name in _MEDIA_TOKENS}
        named.add(config.get_text_config().pad_token_id)
        return tuple(sorted(token for token in named if token is not None and token not in self._ends))

    def expand(self, tokens: Sequence[int], sizes: Sequence[ImageSize]) -> list[int]:
        """Replace the place of each image by all that the model reads of it."""
        places = [at for at, token in enumerate(tokens) if token == self.place_id]
        if len(places) != len(sizes):
            raise ValueError(
                f"expected as many images as places for them, found {len(places)} times {self.placeholder} and "
                f"{len(sizes)} images"
            )
        found: list[int] = []
        begin = 0
        for at, size in zip(places, sizes, strict=True):
            self._append(found, tokens[begin:at])
            self._append(found, self.spell(size))
            begin = at + 1
        self._append(found, tokens[begin:])
        return found

    def collapse(self, tokens: Sequence[int], sizes: Sequence[ImageSize]) -> list[int]:
        """Undo `expand`. Raises ValueError where the tokens of an image are not found whole."""
        found: list[int] = []
        begin = 0
        for size in sizes:
            spelt = self.spell(size)
            starts = (at for at in range(begin, len(tokens)) if tokens[at] == spelt[0])
            at = next((at for at in starts if [*tokens[at : at + len(spelt)]] == spelt), None)
            if at is None:
                raise ValueError(f"expected {len(spelt)} tokens of an image behind token {begin}, found others")
            found += [*tokens[begin:at], self.place_id]
            begin = at + len(spelt)
        return [*found, *tokens[begin:]]

    @property
    def told(self) -> dict[str, Setting]:
        """What the family's own processor must be told to make the same tokens and pixels of the same directory."""
        return {"backend": BACKEND, **self._family.told(self._parts), **self._family.options}

    def spell(self, size: ImageSize) -> list[int]:
        """All tokens of an image."""
        text = self._family.spell(self._parts, size)
        if text not in self._spelt:
            self._spelt[text] = self._encode(text)
        return self._spelt[text]

    def num_tokens(self, size: ImageSize) -> int:
        """Count the states of the tower that an image makes."""
        return self.spell(size).count(self.image_id)

    def prepare(self, encoded: bytes) -> PreparedImage:
        """Decode an image and make its pixels. Raises ValueError where the policy cannot see it."""
        image = open_image(encoded)
        return self._prepared(image, tokens=self.num_tokens(ImageSize(*image.size)), options={})

    def check(self, encoded: bytes) -> None:
        """Raise ValueError where a part of the image would be taken for padding. Most settings make none of any."""
        if self._makes_zeros:
            self.prepare(encoded)

    def blank(self) -> PreparedImage:
        """A small white image that no prompt shows, for passes without one."""
        return self._prepared(Image.new("RGB", (64, 64), (255, 255, 255)), tokens=0, options=self._family.whole)

    def _prepared(self, image: Image.Image, *, tokens: int, options: Mapping[str, object]) -> PreparedImage:
        options = {**self._family.options, **options, "return_tensors": "np"}
        names = self._parts.images.model_input_names
        made = self._parts.images(images=[image], **options)
        arrays = {name: np.asarray(made[name]) for name in names if name in made}
        pixels = arrays["pixel_values"]
        if pixels.ndim == 5:  # one row of frames per image of a batch
            arrays = {name: array[0] for name, array in arrays.items()}
            if any(not frame.any() for frame in arrays["pixel_values"]):
                raise ValueError("every pixel is 0 after normalisation: the model would take it for padding")
        return PreparedImage(arrays, tokens)

    def _append(self, found: list[int], more: Sequence[int]) -> None:
        """Put tokens behind others; newlines that meet are one run to the tokenizer, so they are read as one."""
        begin, end = len(found), 0
        while begin and found[begin - 1] in self._newlines:
            begin -= 1
        while end < len(more) and more[end] in self._newlines:
            end += 1
        if begin < len(found) and end:
            run = sum(self._newlines[token] for token in (*found[begin:], *more[:end]))
            found[begin:] = self._encode("\n" * run)
            more = more[end:]
        found += more

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return tokens

    @cached_property
    def _makes_zeros(self) -> bool:
        """Whether a frame of one colour may become 0 in all channels, in families that drop such frames."""
        images = self._parts.images
        if "pixel_attention_mask" not in images.model_input_names:
            return False
        factor = images.rescale_factor if images.do_rescale else 1.0
        means = images.image_mean if images.do_normalize else [0.0]
        return all(np.isclose(np.arange(256) * factor, mean, atol=1e-6).any() for mean in means)

    @cached_property
    def _newlines(self) -> dict[int, int]:
        """Tokens that spell nothing but newlines, and how many; byte-level vocabularies write a newline as Ċ."""
        return {
            token: len(text) for text, token in self._tokenizer.get_vocab().items() if text and not text.strip("\nĊ")
        }


def load_processor(directory: Path) -> VisionProcessor | None:
    """Load what a policy makes of images; none where it reads text alone. Raises BadInput in one line."""
    kind = _kind(directory)
    if kind not in FAMILIES:
        return None  # of a directory that is no model at all others say so
    if not any((directory / name).is_file() for name in SETTINGS):
        raise BadInput(f"policy {directory}: expected {' or '.join(SETTINGS)} beside a {kind}, which sees; found none")
    from transformers import AutoConfig, AutoImageProcessor

    try:
        config = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        images = AutoImageProcessor.from_pretrained(
            str(directory), backend=BACKEND, local_files_only=True, trust_remote_code=False
        )
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # tokenizers raises Exception itself
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise BadInput(f"policy {directory}: its image processor does not load: {first}") from error
    return _checked(
        FAMILIES[kind], Parts(config, images, lambda token: str(tokenizer.id_to_token(token))), tokenizer, directory
    )


def sees(directory: Path) -> bool:
    """Whether the policy in a directory reads images."""
    return _kind(directory) in FAMILIES


def _kind(directory: Path) -> str:
    return str(_settings(directory / "config.json").get("model_type"))


def open_image(encoded: bytes) -> Image.Image:
    """Decode an image, turned as it is to be shown, in three colours. Raises ValueError where it is none."""
    try:
        with Image.open(BytesIO(encoded)) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"no image that can be decoded: {error}") from error


def _checked(family: Family, parts: Parts, tokenizer: Tokenizer, directory: Path) -> VisionProcessor:
    """Refuse a vocabulary without the tokens that stand for an image."""
    for name in ("image_token_id", "boi_token_index"):
        token = getattr(parts.config, name, None)
        if token is not None and tokenizer.id_to_token(token) is None:
            raise BadInput(f"policy {directory}: expected its tokenizer to have {name} {token} of config.json")
    return VisionProcessor(family, parts, tokenizer, ends=_ends(directory, tokenizer))


def _ends(directory: Path, tokenizer: Tokenizer) -> set[int]:
    """Tokens that end a completion, by the tokenizer's settings and those of generation."""
    named = _settings(directory / "tokenizer_config.json").get("eos_token")
    spelt = named.get("content") if isinstance(named, dict) else named
    stated = _settings(directory / "generation_config.json").get("eos_token_id")
    ends = {*(stated if isinstance(stated, list) else [stated]), tokenizer.token_to_id(str(spelt))}
    return {token for token in ends if isinstance(token, int)}


def _settings(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
