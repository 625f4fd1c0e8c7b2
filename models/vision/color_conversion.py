"""Decoding of images, and their conversion to RGB with 8 bits per channel, the format that policies and judges read.

This is the only file that opens images, and it imports nothing of the project. The plugin that runs in vLLM's
environment loads this file by its path, so the rollout engines (our own and vLLM), the trainer, judges, rewards and
reports read the same pixels from the same bytes.

Images are converted when problems are loaded. An image of which no shade and no transparency would be lost keeps its
bytes. All images are read upright, as their EXIF orientation specifies.

- 16 bits per channel: scaled from 0..65535, or from the range of the sample size of a TIFF file, such as 0..4095 for 12
  bits.
- Color with 16 bits per channel: rounded to 8 bits (`round_color`). Pillow itself reads the upper 8 bits.
- 32-bit integers: scaled from 0..65535 if all values are within this range, otherwise from the image's own range.
- Floating point: scaled from 0..1 if all values are within this range, otherwise from the image's own range. NaN and
  infinite values become black.
- Gray TIFF files in which 0 is white: inverted.
- Transparent: composed on the background color.
"""

import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from io import BytesIO
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageColor, ImageFile, ImageOps
from PIL.PngImagePlugin import PngImageFile, PngInfo
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION, SAMPLEFORMAT, TiffImageFile

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Supported image formats, by Pillow's names. Other formats are not opened, because some of them can contain
programs."""
NOTE: Final = "rheostat-converted"
"""Key of the PNG text entry in which the conversion of an image is recorded."""
FLOAT, INTEGER, SIXTEEN_BITS, TRANSPARENT = "floating point", "32 bits", "16 bits", "transparent"
ROUNDED_COLOR: Final = "rounded color"
CONVERSIONS: Final = (SIXTEEN_BITS, INTEGER, FLOAT, ROUNDED_COLOR, TRANSPARENT)
ROTATED, DEEP_COLOR, INK = "rotated", "color with 16 bits", "CMYK"
READINGS: Final = (ROTATED, DEEP_COLOR, INK)
"""Kinds of images that are stored unchanged but decoded differently than their file may suggest."""
UNSIGNED, SIGNED = 1, 2
"""Values of the TIFF tag SampleFormat for unsigned and signed integers."""
WHITE_IS_ZERO: Final = 0
"""Value of the TIFF tag PhotometricInterpretation for images in which 0 is white."""
KEY_FACTORS: Final = {"L;2": 85, "L;4": 17}
"""Factor by which Pillow scales the gray levels of PNG files with 2 and 4 bits. It is applied to their transparent
level here, because Pillow does not scale that level."""
DEEP_MODES: Final = ("RGB;16", "RGBA;16", "RGBX;16", "LA;16")
"""Pillow's raw modes for pixels with color or transparency and 16 bits per channel, without the letter for the byte
order."""
LOW_BYTES: Final = {"B": "L", "L": "B", "N": "B" if sys.byteorder == "little" else "L"}
"""Byte order to pass to Pillow so that it reads the lower byte of each 16-bit number, keyed by the actual byte
order."""
SIDEWAYS: Final = (5, 6, 7, 8)
"""EXIF orientations with which the width and height of an image are swapped."""
_PNG_ORIENTATION: Final = (b"eXIf", b"Raw profile type", b"XML:com.adobe.xmp")
"""Markers in a PNG file of chunks that can contain an orientation."""


# ---- opening


def open_image(encoded: bytes) -> ImageFile.ImageFile:
    """Open an image without decoding its pixels. May raise any exception of Pillow's decoders."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # `read_header` refuses such images
        image = Image.open(BytesIO(encoded), formats=FORMATS)
    key = image.info.get("transparency")
    if isinstance(image, PngImageFile) and image.tile and key is not None and image.mode in ("L", "RGB"):
        # The key has the bit depth of the file, but the pixels have 8 bits.
        bits = str(image.tile[0].args)
        if bits in KEY_FACTORS:
            image.info["transparency"] = key * KEY_FACTORS[bits]
        elif bits == "RGB;16B":
            image.info["transparency"] = tuple(level >> 8 for level in key)
    return image


def decode_rgb(encoded: bytes) -> Image.Image:
    """Decode an image that a run has stored. The result is upright and in mode RGB. Raises ValueError if the image
    cannot be decoded."""
    try:
        with open_image(encoded) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # decoders raise any kind of exception for unexpected bytes
        raise ValueError(f"the image cannot be decoded: {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def find_orientation(image: ImageFile.ImageFile, encoded: bytes) -> int:
    """Return the EXIF orientation of an opened image. 1 means upright."""
    # Reading the orientation makes Pillow decode all pixels of a PNG file, because the file may store it at the end.
    if image.format == "PNG" and not any(name in encoded for name in _PNG_ORIENTATION):
        return 1
    orientation = image.getexif().get(ExifTags.Base.Orientation)
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


# ---- conversion


class _GrayFormat(NamedTuple):
    """Interpretation of the gray levels that an image with more than 8 bits stores."""

    kind: str
    """Kind of conversion that the image needs, one of `CONVERSIONS`."""
    bits: int = 16
    """Number of bits in which a gray level is stored."""
    signed: bool | None = None
    """Whether gray levels are signed, or None if Pillow already decodes the sign."""
    inverted: bool = False
    """Whether gray level 0 means white instead of black."""


def _find_gray_format(image: Image.Image) -> _GrayFormat | None:
    """Return how to interpret the gray levels of an image with more than 8 bits per level, or None for all other
    images."""
    tags = image.tag_v2 if isinstance(image, TiffImageFile) else {}
    sample, inverted = tags.get(SAMPLEFORMAT, (UNSIGNED,))[0], tags.get(PHOTOMETRIC_INTERPRETATION) == WHITE_IS_ZERO
    bits = tags.get(BITSPERSAMPLE, (16,))[0]
    if image.mode.startswith("I;16"):
        return _GrayFormat(SIXTEEN_BITS, bits, inverted=inverted)
    if image.mode == "I":
        is_unsigned = bool(tags) and bits == 32 and sample == UNSIGNED
        return _GrayFormat(INTEGER, signed=False if is_unsigned else None, inverted=inverted)
    if image.mode == "F":
        return _GrayFormat(FLOAT, inverted=inverted)
    if image.mode == "L" and bits == 8 and sample == SIGNED:
        return _GrayFormat(INTEGER, signed=True, inverted=inverted)
    return None


def find_conversion(image: ImageFile.ImageFile, encoded: bytes, *, rounds_color: bool = True) -> str:
    """Return the reason why an image must be converted to 8-bit RGB, one of `CONVERSIONS`, or an empty string if it
    need not be converted. Without `rounds_color`, the upper 8 bits of 16-bit colors are used.

    Only the pixels of images with an alpha channel and of colors with 16 bits are decoded, because many such images are
    opaque, or have colors of 8 bits.
    """
    if (gray := _find_gray_format(image)) is not None:
        return gray.kind
    rounded = round_color(image, encoded) if rounds_color else None
    if image.has_transparency_data and image.convert("RGBA").getchannel("A").getextrema() != (255, 255):
        return TRANSPARENT
    return "" if rounded is None or np.array_equal(np.asarray(rounded), np.asarray(image)) else ROUNDED_COLOR


def round_color(image: ImageFile.ImageFile, encoded: bytes) -> Image.Image | None:
    """Return an image with 16 bits per color (or gray and transparency) channel, rounded to 8 bits. Return None for all
    other images, and for files whose lower bytes Pillow cannot read, such as separate planes."""
    with open_image(encoded) as other:
        raw_modes = {tile.args if isinstance(tile.args, str) else str((tile.args or ("",))[0]) for tile in other.tile}
        raw_mode = raw_modes.pop() if len(raw_modes) == 1 else ""
        if raw_mode[:-1] not in DEEP_MODES or raw_mode[-1] not in LOW_BYTES:
            return None
        if raw_mode == "LA;16B":
            other._mode, other.tile = "RGBA", [tile._replace(args="RGBA") for tile in other.tile]
            levels_YXC = np.asarray(other).view(">u2").astype(np.uint32)
        else:
            low_mode = raw_mode[:-1] + LOW_BYTES[raw_mode[-1]]
            other.tile = [
                tile._replace(args=low_mode if isinstance(tile.args, str) else (low_mode, *(tile.args or ())[1:]))
                for tile in other.tile
            ]
            levels_YXC = np.asarray(image).astype(np.uint32) * 256 + np.asarray(other)
    rounded = Image.fromarray(((levels_YXC + 128) // 257).astype(np.uint8)).convert(image.mode)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = find_orientation(image, encoded)
    rounded.info["exif"] = exif.tobytes()
    if "transparency" in image.info:
        rounded.putalpha(image.convert("RGBA").getchannel("A"))
    return rounded


def convert_to_rgb(
    image: ImageFile.ImageFile, encoded: bytes, background: str, *, rounds_color: bool = True
) -> Image.Image:
    """Return an opened image upright and in mode RGB. A transparent image is composed on `background`, a color in
    Pillow's notation. Without `rounds_color`, the upper 8 bits of 16-bit colors are used."""
    gray, key = _find_gray_format(image), image.info.get("transparency")
    rounded = round_color(image, encoded) if rounds_color and gray is None else None
    upright = ImageOps.exif_transpose(image if rounded is None else rounded)
    if gray is not None:
        levels_YX = _read_levels(upright, gray)
        shades = Image.fromarray(_scale(levels_YX, gray)).convert("RGB")
        if isinstance(key, int) and gray.kind == SIXTEEN_BITS:
            shades.putalpha(Image.fromarray(np.where(levels_YX == key, 0, 255).astype(np.uint8)))
            return _compose(shades, background)
        return shades
    return _compose(upright.convert("RGBA"), background) if upright.has_transparency_data else upright.convert("RGB")


def _compose(layer: Image.Image, background: str) -> Image.Image:
    """Draw an RGBA image over the background color, and return the result in mode RGB."""
    ground = Image.new("RGBA", layer.size, (*ImageColor.getrgb(background)[:3], 255))
    return Image.alpha_composite(ground, layer).convert("RGB")


def _read_levels(image: Image.Image, gray: _GrayFormat) -> NDArray[np.float64]:
    """Return the gray levels of an image as float64 of shape (height, width)."""
    levels_YX = np.asarray(image)
    if gray.signed is not None:
        kind = "i" if gray.signed else "u"
        levels_YX = levels_YX.view(np.dtype(f"{kind}{levels_YX.dtype.itemsize}"))
    return levels_YX.astype(np.float64)


def _scale(levels_YX: NDArray[np.float64], gray: _GrayFormat) -> NDArray[np.uint8]:
    """Scale gray levels, stored in the format `gray`, to the range 0 to 255."""
    is_finite_YX = np.isfinite(levels_YX)
    finite = levels_YX[is_finite_YX]
    low, high = 0.0, 1.0 if gray.kind == FLOAT else float(2**gray.bits - 1)
    if finite.size and (finite.min() < low or finite.max() > high):
        low, high = float(finite.min()), float(finite.max())
    shades_YX = np.where(is_finite_YX, levels_YX, high if gray.inverted else low) - low
    shades_YX *= 255 / (high - low) if high > low else 0.0
    return np.rint(255 - shades_YX if gray.inverted else shades_YX).astype(np.uint8)


def encode_converted(
    image: ImageFile.ImageFile, encoded: bytes, background: str, *, rounds_color: bool = True
) -> bytes:
    """Convert an opened image to RGB and return it as a PNG file, upright according to its EXIF orientation. A text
    entry of the PNG names the conversion. Transparent images are composed on `background`. Without `rounds_color`, the
    upper 8 bits of 16-bit colors are used."""
    note = PngInfo()
    note.add_text(NOTE, find_conversion(image, encoded, rounds_color=rounds_color))
    upright = convert_to_rgb(image, encoded, background, rounds_color=rounds_color)
    upright.info.clear()
    sink = BytesIO()
    upright.save(sink, "PNG", optimize=False, compress_level=6, pnginfo=note)
    return sink.getvalue()


# ---- counts


def count_conversions(images: Iterable[bytes]) -> dict[str, int]:
    """Return the number of distinct images, and how many of them are of each kind in `CONVERSIONS` and `READINGS`.
    Kinds without images are left out."""
    distinct = set(images)
    kinds = Counter(kind for encoded in distinct for kind in _list_kinds(encoded))
    return {"images": len(distinct), **{kind: kinds[kind] for kind in (*CONVERSIONS, *READINGS) if kinds[kind]}}


def _list_kinds(encoded: bytes) -> list[str]:
    """Return the kinds of conversion that were recorded for an image, and the ways in which it is decoded differently
    than its file may suggest."""
    with open_image(encoded) as image:
        if (note := image.info.get(NOTE)) is not None:
            return [str(note)]
        tags = image.tag_v2 if isinstance(image, TiffImageFile) else {}
        bits = max(tags.get(BITSPERSAMPLE, (8,)))
        is_deep = bits > 8 or (image.format == "PNG" and bool(image.tile) and ";16" in str(image.tile[0].args))
        has_color = image.mode in ("RGB", "RGBA", "RGBX")
        return [
            *([ROTATED] if find_orientation(image, encoded) != 1 else []),
            *([DEEP_COLOR] if is_deep and has_color else []),
            *([INK] if image.mode == "CMYK" else []),
        ]
