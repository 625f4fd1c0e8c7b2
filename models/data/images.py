"""Images of problems: read from the rows of a file and checked before training starts. Torch-free.

The encoded bytes are stored unchanged, except of images that need a conversion (`color_conversion`). Otherwise only the
header is used. Pixels are decoded just to check that this is possible.
"""

import base64
import binascii
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Final

import pyarrow as pa
from blake3 import blake3
from PIL import ExifTags, Image, ImageFile, ImageOps

from infra.errors import BadInput
from infra.store.inputs import fetch_path, format_path, is_remote
from models.data.color_conversion import convert_to_rgb, encode_converted, find_conversion
from models.records.schemas import MEDIA_SCHEMA
from models.vision.families import ImageSize

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Supported formats in Pillow's names. Some formats beyond these contain programs."""
SEVERAL_FRAMES: Final = "MPO"
"""Format of JPEG files from phones, in which the additional frames are previews of the first."""
MAX_PIXELS: Final = Image.MAX_IMAGE_PIXELS or 2**26
"""Maximum number of pixels of an image (Pillow's limit). A small file with more pixels may be an attack on the memory.
"""
SHARD_BYTES: Final = 2**26
"""Maximum size of the images in a media shard, in bytes. A larger image gets a separate shard."""
THUMBNAIL_BYTES: Final = 4096
"""Maximum size of a thumbnail in bytes."""
MAX_ASPECT_RATIO: Final = 200
"""Maximum ratio of the longer side to the shorter one, the limit of Qwen's image processors."""
_LYING: Final = (5, 6, 7, 8)
"""EXIF orientation values that swap width and height."""
_PNG_ORIENTATION: Final = (b"eXIf", b"Raw profile type", b"XML:com.adobe.xmp")
"""Chunk names in a PNG file that can contain an orientation."""
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
_DATA: Final = re.compile(r"data:image/[\w.+-]+;base64,")


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """Header data of an encoded image."""

    digest: str
    """BLAKE3 digest of the encoded bytes."""
    format: str
    """Format in Pillow's naming."""
    size: ImageSize
    """Width and height in pixels, after the EXIF orientation is applied."""


def digest_of(encoded: bytes) -> str:
    """Return the digest that identifies an image."""
    return blake3(encoded).hexdigest()


def read_header(encoded: bytes, *, where: str) -> ImageHeader:
    """Read the header of an image.

    Raises BadInput if the image cannot be opened, has too many pixels or none, several frames or extreme proportions.
    """
    with _open_image(encoded, where=where) as image:
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise _too_many_pixels(where, f"{width} x {height}")
        # Reading the orientation makes Pillow decode all pixels of a PNG file, because the file may store it at the
        # end.
        may_be_rotated = image.format != "PNG" or any(name in encoded for name in _PNG_ORIENTATION)
        is_rotated = may_be_rotated and image.getexif().get(ExifTags.Base.Orientation) in _LYING
        frames = 1 if image.format == SEVERAL_FRAMES else getattr(image, "n_frames", 1)
        header = ImageHeader(
            digest_of(encoded), image.format or "", ImageSize(*((height, width) if is_rotated else (width, height)))
        )
    if frames > 1:
        raise BadInput(f"{where}: expected a single picture, found an animation or document of {frames} frames")
    if not width or not height:
        raise BadInput(f"{where}: the image has no pixels, its size is {width} x {height}")
    if max(header.size) > MAX_ASPECT_RATIO * min(header.size):
        raise BadInput(
            f"{where}: the image is {width} x {height} pixels. Its longer side may be at most "
            f"{MAX_ASPECT_RATIO} times its shorter side."
        )
    return header


def check_pixels(encoded: bytes, *, where: str) -> None:
    """Raise BadInput if the pixels of an image cannot be decoded completely."""
    with _open_image(encoded, where=where) as image:
        try:
            image.load()
        except Exception as error:  # decoders raise any kind of exception for unexpected bytes
            raise BadInput(f"{where}: the image cannot be decoded: {_reason(error)}") from error


def data_address(encoded: bytes) -> str:
    """Return an image as a URL `data:image/...;base64,...`, for use within a request or a page."""
    with _open_image(encoded, where="image") as image:
        kind = Image.MIME[image.format or ""]
    return f"data:{kind};base64,{base64.b64encode(encoded).decode()}"


def open_picture(encoded: bytes, *, background: str = "white") -> Image.Image:
    """Decode an image to RGB with its EXIF orientation applied, all shades scaled and transparency on the background.

    Raises BadInput if the image cannot be opened.
    """
    with _open_image(encoded, where="image") as opened:
        return convert_to_rgb(ImageOps.exif_transpose(opened), background)


def convert_image(encoded: bytes, background: str, *, where: str) -> bytes:
    """Return an image as it is, or as an RGB PNG if policies would lose shades or transparency of it.

    Raises BadInput if the image cannot be decoded.
    """
    with _open_image(encoded, where=where) as image:
        try:
            return encode_converted(image, background) if find_conversion(image) else encoded
        except Exception as error:  # decoders raise any kind of exception for unexpected bytes
            raise BadInput(f"{where}: the image cannot be decoded: {_reason(error)}") from error


def thumbnail(encoded: bytes) -> bytes:
    """Return a small copy of an image for a page, of at most `THUMBNAIL_BYTES`.

    Tiny pictures are enlarged without smoothing.
    """
    image = open_picture(encoded)
    image.info.clear()  # color profiles may be larger than the copy
    for side in (96, 64, 32):
        small = image.copy()
        small.thumbnail((side, side))
        if (factor := side // max(small.size)) > 1:
            small = small.resize((small.width * factor, small.height * factor), Image.Resampling.NEAREST)
        for kind, options in (("PNG", {"optimize": True}), ("JPEG", {"quality": 80}), ("JPEG", {"quality": 40})):
            sink = BytesIO()
            small.save(sink, kind, **options)
            if sink.tell() <= THUMBNAIL_BYTES:
                return sink.getvalue()
    raise AssertionError("an uncompressed thumbnail of 32 x 32 pixels has only 3,072 bytes")


def _open_image(encoded: bytes, *, where: str) -> ImageFile.ImageFile:
    """Open an image without decoding its pixels. Raises BadInput if the file is not a supported image."""
    try:
        with warnings.catch_warnings():
            # images with that many pixels are rejected by `read_header`
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return Image.open(BytesIO(encoded), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise _too_many_pixels(where, "more than twice that") from error
    except Exception as error:  # decoders raise any kind of exception
        expected = ", ".join(FORMATS)
        raise BadInput(
            f"{where}: the file cannot be decoded as an image ({expected}). It starts with {encoded[:8]!r}."
        ) from error


def _too_many_pixels(where: str, size: str) -> BadInput:
    """Return the error for an image with too many pixels."""
    return BadInput(f"{where}: the image is too large to decode: at most {MAX_PIXELS:,} pixels, found {size}")


def _reason(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def media_tables(images: Iterable[bytes]) -> Iterator[pa.Table]:
    """Yield the distinct images as tables of media shards, in the order of first use."""
    rows: list[tuple[object, ...]] = []
    digests, shard_bytes = set[str](), 0
    for encoded in images:
        if (digest := digest_of(encoded)) in digests:
            continue
        digests.add(digest)
        if rows and shard_bytes + len(encoded) > SHARD_BYTES:
            yield _build_media_table(rows)
            rows, shard_bytes = [], 0
        header = read_header(encoded, where=f"image {digest}")
        rows.append((digest, header.format, *header.size, encoded))
        shard_bytes += len(encoded)
    if rows:
        yield _build_media_table(rows)


def _build_media_table(rows: Sequence[tuple[object, ...]]) -> pa.Table:
    """Build the table of a media shard from its rows."""
    return pa.table([list(column) for column in zip(*rows, strict=True)], schema=MEDIA_SCHEMA)


# ---- images in the rows of a file


def read_images(row: Mapping[str, object], column: str, *, place: str, root: Path) -> tuple[bytes, ...]:
    """Read the images in a column of a row, which holds one image, a list or None. Empty for None.

    Raises BadInput if an image cannot be read.
    """
    value = row[column]
    values = value if isinstance(value, list) else [] if value is None else [value]
    names = [column] if not isinstance(value, list) else [f"{column}[{index}]" for index in range(len(values))]
    return tuple(
        _read_image(each, where=f"{place}: {name}", root=root) for each, name in zip(values, names, strict=True)
    )


def _read_image(value: object, *, where: str, root: Path) -> bytes:
    """Return the encoded image that a value contains or names. Raises BadInput if the image cannot be read."""
    match value:
        case bytes():
            encoded = value
        case {"bytes": bytes(content)}:
            encoded = content
        case {"path": str(name)} | str(name):
            encoded = (
                _decode_data_url(name, where=where)
                if name.startswith("data:")
                else _read_image_file(name, where=where, root=root)
            )
        case _:
            raise BadInput(
                f"{where}: expected an image as a path, bytes, {{bytes, path}} or a data:image/...;base64 URL, "
                f"found {type(value).__name__} {value!r:.60}"
            )
    read_header(encoded, where=where)
    return encoded


def _decode_data_url(address: str, *, where: str) -> bytes:
    """Decode a `data:` URL. Raises BadInput if it is invalid."""
    start = _DATA.match(address)
    if start is None:
        raise BadInput(f"{where}: expected a URL that starts with data:image/...;base64, found {address[:40]!r}")
    try:
        return base64.b64decode(address[start.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadInput(f"{where}: the image data is not valid base64: {error}") from error


def _read_image_file(name: str, *, where: str, root: Path) -> bytes:
    """Read a file below the root.

    Raises BadInput if the path leaves the root through `..` or a link, or cannot be read.
    """
    if _SCHEME.match(name):
        raise BadInput(
            f"{where}: {name[:60]!r} is a URL. Download the image and name a path below data.images_root instead."
        )
    relative_path = Path(name)
    if relative_path.is_absolute() or ".." in relative_path.parts:
        raise _outside_root(name, where=where, root=root)
    try:
        path = fetch_path(root / relative_path)
    except (BadInput, OSError) as error:
        raise BadInput(f"{where}: {error}") from error
    try:
        if not is_remote(root) and not path.resolve().is_relative_to(root.resolve()):
            raise _outside_root(name, where=where, root=root)
        return path.read_bytes()
    except OSError as error:
        raise BadInput(
            f"{where}: {format_path(root / relative_path)} cannot be read: {error.strerror or error}"
        ) from error


def _outside_root(name: str, *, where: str, root: Path) -> BadInput:
    """Return the error for a path outside the root."""
    return BadInput(
        f"{where}: expected a file below {format_path(root)} (data.images_root), but {name[:80]!r} is outside of it"
    )
