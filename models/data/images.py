"""Images of problems: read from the rows of a file and checked before training starts. Torch-free.

The encoded bytes are stored unchanged, except of images that need a conversion
(`rheostat.models.vision.color_conversion`). Otherwise only the header is used. Pixels are decoded just to check that
this is possible.
"""

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Final

import pyarrow as pa
from blake3 import blake3
from PIL import Image, ImageFile

from rheostat.infra.errors import BadInput
from rheostat.infra.store.inputs import fetch_path, format_path, is_remote
from rheostat.infra.user_files import FETCH_LFS, LFS_POINTER
from rheostat.models.data.complete_images import find_missing_data
from rheostat.models.records.schemas import MEDIA_SCHEMA
from rheostat.models.vision.color_conversion import (
    FORMATS,
    SIDEWAYS,
    convert_to_rgb,
    describe_error,
    encode_converted,
    find_conversion,
    find_orientation,
    open_image,
)
from rheostat.models.vision.families import ImageSize

SEVERAL_FRAMES: Final = "MPO"
"""Pillow's name of the format of JPEG files with several frames, as from phones. The additional frames are previews of
the first one."""
MAX_PIXELS: Final = Image.MAX_IMAGE_PIXELS or 2**26
"""Maximum number of pixels of an image (Pillow's limit). A small file that decodes to more pixels may be an attempt to
exhaust the memory."""
SHARD_BYTES: Final = 2**26
"""Maximum total size in bytes of the images in a media shard. A larger image gets a shard for itself."""
THUMBNAIL_BYTES: Final = 4096
"""Maximum size of a thumbnail in bytes."""
MAX_ASPECT_RATIO: Final = 200
"""Maximum ratio of the longer side to the shorter one, the limit of Qwen's image processors."""
SIGNATURES: Final = {
    "PNG": re.compile(rb"\x89PNG"),
    "JPEG": re.compile(rb"\xff\xd8"),
    "WEBP": re.compile(rb"RIFF....WEBP", re.DOTALL),
    "GIF": re.compile(rb"GIF8"),
    "BMP": re.compile(rb"BM"),
    "TIFF": re.compile(rb"II[*+]\0|MM\0[*+]"),
}
"""Pattern of the first bytes of a file, by the name of its supported format."""
BASE64: Final = re.compile(rb"iVBORw0KGgo|/9j/|R0lGOD|UklGR|data:image/")
"""Pattern with which a text begins that contains a Base64-encoded image or a data URL."""
UNSUPPORTED: Final = {
    "an SVG drawing": re.compile(rb"(<\?xml[^>]*>|<!--.*?-->|<!DOCTYPE svg[^>]*>|\s)*<svg", re.DOTALL | re.IGNORECASE),
    "a PDF document": re.compile(rb"%PDF-"),
    "a PostScript document": re.compile(rb"%!PS"),
    "an HTML page, perhaps of a failed download": re.compile(rb"<(!doctype )?html", re.IGNORECASE),
    "an AVIF image": re.compile(rb"....ftypavi[fs]", re.DOTALL),
    "a HEIC image": re.compile(rb"....ftyp(hei|hev|mif1|msf1)", re.DOTALL),
    "a JPEG 2000 image": re.compile(rb"....jP  |\xff\x4f\xff\x51", re.DOTALL),
    "a JPEG XL image": re.compile(rb"\xff\x0a|....JXL ", re.DOTALL),
    "a NumPy array": re.compile(rb"\x93NUMPY"),
    "a DICOM image": re.compile(rb".{128}DICM", re.DOTALL),
    "Base64 text instead of bytes": BASE64,
}
"""Pattern of the first bytes of a file in an unsupported format, by the name of the format in error messages."""
MAX_NAME_BYTES: Final = 255
"""Maximum size in bytes of a file or folder name, as limited by file systems."""
MIN_BASE64: Final = 60
"""Minimum length of a text that may be Base64 data. A shorter text is read as a path."""
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_DATA: Final = re.compile(r"data:image/[\w.+-]+(;[\w.+-]+=[\w.+-]+)*;base64,", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """Information about an encoded image that is known without decoding its pixels."""

    digest: str
    """BLAKE3 digest of the encoded bytes, by which shards refer to the image."""
    format: str
    """File format as named by Pillow, such as PNG."""
    size: ImageSize
    """Width and height in pixels, after the EXIF orientation is applied."""


def digest_of(encoded: bytes) -> str:
    """Return the BLAKE3 digest of an encoded image, by which rollout shards and samples refer to the image."""
    return blake3(encoded).hexdigest()


def read_header(encoded: bytes, *, where: str) -> ImageHeader:
    """Return an image's digest, format and size without decoding its pixels.

    Raises BadInput, which names the image as `where`, if the image cannot be opened, has too many pixels or none,
    several frames or extreme proportions.
    """
    with _open_image(encoded, where=where) as image:
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise _too_many_pixels(where, f"{width} x {height}")
        # Pillow applies the orientation to the size of a TIFF file itself.
        is_sideways = image.format != "TIFF" and find_orientation(image, encoded) in SIDEWAYS
        frames = 1 if image.format == SEVERAL_FRAMES else getattr(image, "n_frames", 1)
        header = ImageHeader(
            digest_of(encoded), image.format or "", ImageSize(*((height, width) if is_sideways else (width, height)))
        )
    if frames > 1:
        raise BadInput(
            f"{where}: the file is an animation or a document of {frames} frames, but only files with a single "
            "picture are supported. Save one frame as a PNG or JPEG file."
        )
    if not width or not height:
        raise BadInput(
            f"{where}: the image has no pixels, because its size is {width} x {height}. Replace the file, or remove "
            "the row."
        )
    if max(header.size) > MAX_ASPECT_RATIO * min(header.size):
        raise BadInput(
            f"{where}: the image is {width} x {height} pixels. Its longer side may be at most "
            f"{MAX_ASPECT_RATIO} times its shorter side."
        )
    return header


def check_pixels(encoded: bytes, *, where: str, allows_missing: bool = False) -> None:
    """Decode an image and raise BadInput, which names the image as `where`, if some of its pixels cannot be decoded.

    With `allows_missing`, missing pixels that Pillow fills are allowed.
    """
    with _open_image(encoded, where=where) as image:
        try:
            image.convert("RGB")
            missing = None if allows_missing else find_missing_data(encoded)
        except Exception as error:  # decoders raise any kind of exception for unexpected bytes
            raise _undecodable(error, where=where) from error
    if missing is not None:
        raise BadInput(f"{where}: the image is truncated: {missing}. Copy or download the file again")


def data_address(encoded: bytes) -> str:
    """Return a `data:image/...;base64,...` URL that contains the image, for requests and HTML pages."""
    with _open_image(encoded, where="image") as image:
        kind = Image.MIME["JPEG" if image.format == SEVERAL_FRAMES else image.format or ""]
    return f"data:{kind};base64,{base64.b64encode(encoded).decode()}"


def open_picture(encoded: bytes, *, background: str = "white") -> Image.Image:
    """Decode an image to RGB, with its EXIF orientation applied and its transparent parts in the color `background`.

    Raises BadInput if the image cannot be decoded.
    """
    with _open_image(encoded, where="image") as opened:
        try:
            return convert_to_rgb(opened, encoded, background)
        except Exception as error:  # decoders raise any kind of exception for unexpected bytes
            raise _undecodable(error, where="image") from error


def convert_image(encoded: bytes, background: str, *, where: str, rounds_color: bool = True) -> bytes:
    """Return the encoded image unchanged, unless a policy would lose shades (more than 8 bits) or transparency of it.
    In this case return it converted to an RGB PNG, with transparent parts in the color `background`.

    Without `rounds_color`, images of color with 16 bits are unchanged. Raises BadInput if the image cannot be decoded.
    """
    with _open_image(encoded, where=where) as image:
        try:
            if not find_conversion(image, encoded, rounds_color=rounds_color):
                return encoded
            return encode_converted(image, encoded, background, rounds_color=rounds_color)
        except Exception as error:  # decoders raise any kind of exception for unexpected bytes
            raise _undecodable(error, where=where) from error


def thumbnail(encoded: bytes) -> bytes:
    """Return a small encoded copy of an image, of at most `THUMBNAIL_BYTES`, to be embedded in an HTML page.

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
    raise AssertionError(
        "no copy of the image was small enough to be embedded in a page, although every copy of 32 x 32 pixels fits"
    )


def _open_image(encoded: bytes, *, where: str) -> ImageFile.ImageFile:
    """Open an encoded image without decoding its pixels. Raises BadInput, which names the image as `where`, if the file
    is not a supported image."""
    try:
        return open_image(encoded)
    except Image.DecompressionBombError as error:
        raise _too_many_pixels(where, "more than twice that") from error
    except Exception as error:  # decoders raise any kind of exception
        raise BadInput(f"{where}: {_describe_unsupported(encoded)}") from error


def _describe_unsupported(encoded: bytes) -> str:
    """Return the reason why a file cannot be opened as an image, as the end of a message. It names the kind of file if
    this is known."""
    supported = ", ".join(FORMATS)
    start = encoded[:512].lstrip(b"\xef\xbb\xbf \t\r\n")
    if not encoded:
        return "the image is empty (0 bytes), but it must be the bytes of an image file"
    if start.startswith(LFS_POINTER):
        return f"the image {FETCH_LFS}"
    for name, pattern in UNSUPPORTED.items():
        if pattern.match(start):
            return f"the file is {name}, which cannot be decoded as an image. Convert it to one of {supported}"
    signed = next((name for name, pattern in SIGNATURES.items() if pattern.match(encoded)), None)
    if signed is not None:
        return (
            f"the {signed} file cannot be decoded as an image. It is damaged, or Pillow does not support its kind of "
            "pixels, such as 64-bit numbers. Save it as PNG with 8 or 16 bits"
        )
    return (
        f"the file cannot be decoded as an image. It starts with {encoded[:8]!r}, but supported files are "
        f"{supported}. Convert the file, or check that the path is correct"
    )


def _too_many_pixels(where: str, size: str) -> BadInput:
    """Return the error for an image with too many pixels."""
    return BadInput(
        f"{where}: the image has {size} pixels, but at most {MAX_PIXELS:,} pixels are allowed. Make the image smaller."
    )


def _undecodable(error: Exception, *, where: str) -> BadInput:
    """Return the error for an image whose header is valid but whose pixels cannot be decoded."""
    return BadInput(
        f"{where}: the pixels of the image cannot be decoded: {describe_error(error)}. Save the image again as PNG, "
        "or copy the file again."
    )


def media_tables(images: Iterable[bytes]) -> Iterator[pa.Table]:
    """Yield tables for media shards, which together contain each distinct image once, in the order of first use."""
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
    """Build the table of a media shard from its rows, one for each image."""
    return pa.table([list(column) for column in zip(*rows, strict=True)], schema=MEDIA_SCHEMA)


# ---- images in the rows of a file


def read_images(row: Mapping[str, object], column: str, *, place: str, root: Path) -> tuple[bytes, ...]:
    """Return the encoded images in a column of a row: one image, a list of images, or None for no images.

    Paths of image files are relative to `root`. Raises BadInput, which names the row's `place`, if an image cannot be
    read.
    """
    value = row[column]
    values = value if isinstance(value, list) else [] if value is None else [value]
    names = [column] if not isinstance(value, list) else [f"{column}[{index}]" for index in range(len(values))]
    return tuple(
        _read_image(each, where=f"{place}: {name}", root=root) for each, name in zip(values, names, strict=True)
    )


def _read_image(value: object, *, where: str, root: Path) -> bytes:
    """Return the encoded image that a value contains, or the content of the file that it names. Raises BadInput, which
    names the image as `where`, if the image cannot be read."""
    match value:
        case bytes():
            encoded = value
        case {"bytes": bytes(content)}:
            encoded = content
        case {"path": str(name)} | str(name):
            encoded = (
                _decode_data_url(name, where=where)
                if name[:5].lower() == "data:"
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
    """Return the bytes in a `data:` URL. Raises BadInput if the URL is invalid."""
    start = _DATA.match(address)
    if start is None:
        raise BadInput(
            f"{where}: the image URL must start with data:image/...;base64, but it starts with {address[:40]!r}. "
            "Encode the image as Base64, or write its path."
        )
    try:
        return base64.b64decode(address[start.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadInput(
            f"{where}: the image URL does not contain valid Base64 data: {error}. Encode the bytes of the image file "
            "again."
        ) from error


def _read_image_file(name: str, *, where: str, root: Path) -> bytes:
    """Return the bytes of an image file below the directory `root`.

    Raises BadInput if the path leaves `root` through `..` or a link, or if the file cannot be read.
    """
    if _SCHEME.match(name):
        raise BadInput(
            f"{where}: {name[:60]!r} is a URL, but runs never download images. Download the image, and write its path "
            "below data.images_root."
        )
    encoded_name = name.encode(errors="replace")
    is_base64 = BASE64.match(encoded_name) is not None and len(name) > MIN_BASE64
    is_too_long = any(len(part) > MAX_NAME_BYTES for part in encoded_name.split(b"/"))
    if not name or b"\0" in encoded_name or is_base64 or is_too_long:
        raise BadInput(
            f"{where}: expected the path of an image, found a text of {len(name):,} characters that starts with "
            f"{name[:20]!r}. Write Base64 data as data:image/png;base64,… or as bytes."
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
    except (OSError, ValueError) as error:  # a ValueError if the path is not valid Unicode
        raise BadInput(
            f"{where}: {format_path(root / relative_path)} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error


def _outside_root(name: str, *, where: str, root: Path) -> BadInput:
    """Return the error for an image path that leads outside of the root directory."""
    return BadInput(
        f"{where}: image paths must name files below {format_path(root)} (data.images_root), but {name[:80]!r} is "
        "outside of it. Move the file, or change data.images_root."
    )
