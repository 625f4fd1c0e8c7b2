"""Conversion of images to RGB with 8 bits per channel, the only format in which policies and judges read images.

Images are converted when problems are loaded, so that the rollout engines (our own and vLLM), the trainer, judges and
reports all read the same pixels from the same bytes. An image of which no shade and no transparency would be lost
keeps its bytes.

- 16 bits per channel: scaled from 0..65535. Pillow itself reads color images of 16 bits with their upper 8 bits.
- 32-bit integers: scaled from 0..65535 if all values are within this range, otherwise from the image's own range.
- Floating point: scaled from 0..1 if all values are within this range, otherwise from the image's own range. NaN and
  infinite values become black.
- Transparent: composed on the background color.
"""

from collections import Counter
from collections.abc import Iterable
from io import BytesIO
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageColor, ImageOps
from PIL.PngImagePlugin import PngInfo

MAX_SHADE: Final = 65535
"""Largest value of a channel with 16 bits."""
NOTE: Final = "rheostat-converted"
"""Key of the PNG text that names the conversion of an image."""
FLOAT, INTEGER, SIXTEEN_BITS, TRANSPARENT = "floating point", "32 bits", "16 bits", "transparent"
CONVERSIONS: Final = (SIXTEEN_BITS, INTEGER, FLOAT, TRANSPARENT)


def find_conversion(image: Image.Image) -> str:
    """Return the reason why an image needs a conversion, one of `CONVERSIONS`, or an empty string.

    Only the pixels of images with an alpha channel are decoded, because many such images are opaque.
    """
    if image.mode.startswith("I;16"):
        return SIXTEEN_BITS
    if image.mode == "I":
        return INTEGER
    if image.mode == "F":
        return FLOAT
    if not image.has_transparency_data:
        return ""
    return TRANSPARENT if image.convert("RGBA").getchannel("A").getextrema() != (255, 255) else ""


def convert_to_rgb(image: Image.Image, background: str) -> Image.Image:
    """Return an image in mode RGB. Transparent images are composed on `background`, a color in Pillow's notation."""
    kind = find_conversion(image)
    if kind == TRANSPARENT:
        layer = image.convert("RGBA")
        ground = Image.new("RGBA", layer.size, (*ImageColor.getrgb(background)[:3], 255))
        return Image.alpha_composite(ground, layer).convert("RGB")
    if not kind:
        return image.convert("RGB")
    levels_YX = np.asarray(image).astype(np.float64)
    return Image.fromarray(_scale(levels_YX, is_float=kind == FLOAT)).convert("RGB")


def _scale(levels_YX: NDArray[np.float64], *, is_float: bool) -> NDArray[np.uint8]:
    """Scale gray levels to 0..255."""
    is_finite_YX = np.isfinite(levels_YX)
    finite = levels_YX[is_finite_YX]
    low, high = 0.0, 1.0 if is_float else float(MAX_SHADE)
    if finite.size and (finite.min() < low or finite.max() > high):
        low, high = float(finite.min()), float(finite.max())
    shades_YX = np.where(is_finite_YX, levels_YX, low) - low
    factor = 255 / (high - low) if high > low else 0.0
    return np.rint(shades_YX * factor).astype(np.uint8)


def encode_converted(image: Image.Image, background: str) -> bytes:
    """Return an image that needs a conversion as an RGB PNG that names the conversion, upright (EXIF orientation)."""
    note = PngInfo()
    note.add_text(NOTE, find_conversion(image))
    upright = convert_to_rgb(ImageOps.exif_transpose(image), background)
    upright.info.clear()
    sink = BytesIO()
    upright.save(sink, "PNG", optimize=False, compress_level=6, pnginfo=note)
    return sink.getvalue()


def count_conversions(images: Iterable[bytes]) -> dict[str, int]:
    """Return the number of images and, for each conversion, the number of converted images (equal images once)."""
    distinct = set(images)
    notes: Counter[str] = Counter()
    for encoded in distinct:
        if encoded.startswith(b"\x89PNG") and NOTE.encode() in encoded[:256]:
            with Image.open(BytesIO(encoded), formats=("PNG",)) as image:
                notes[str(image.info.get(NOTE))] += 1
    return {"images": len(distinct), **{kind: notes[kind] for kind in CONVERSIONS if notes[kind]}}
