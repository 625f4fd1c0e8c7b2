"""Detection of image files whose data ends before all pixels.

Pillow refuses most of these files. It accepts a PNG file whose compressed data has too few rows, and a JPEG file with
an end marker before the last pixels, and fills the missing pixels with black or gray.
"""

import zlib
from collections.abc import Iterator
from typing import Final

from PIL import ImageChops, ImageFile

from rheostat.models.vision.color_conversion import open_image

_CHANNELS: Final = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Number of channels of a pixel, by the color type in the header of a PNG file."""
_PASSES: Final = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""Pixels of each pass of an interlaced PNG file: first column, first row, distance of columns, distance of rows."""
_PIECE: Final = 2**20
"""Maximum number of bytes that are decompressed at a time."""
_BLOCK: Final = 8
"""Width and height in pixels of the blocks that a JPEG file consists of."""
_SMALL: Final = 2**16
"""Number of pixels up to which a JPEG file is always checked by decoding it again."""
_FLAT: Final = 8
"""Maximum difference between the gray levels of a block that counts as having no details. Such a block may be missing,
because decoders fill missing blocks with one color."""
_END: Final = b"\xff\xd9"
"""Marker with which a JPEG file ends."""
_PROBE: Final = b"\0" + b"".join(bytes(range(1, 255)) + bytes([255, 0xD0 + number % 8]) for number in range(64))
"""Bytes with restart markers that replace the end of a JPEG file. They change decoded pixels only if pixels were
missing."""


def find_missing_data(encoded: bytes) -> str | None:
    """Return a description of the data that an image file lacks although Pillow can decode it, as the end of a message.
    Return None if the file is complete."""
    with open_image(encoded) as image:
        if image.format == "PNG":
            return _find_missing_rows(encoded)
        if image.format in ("JPEG", "MPO") and _ends_early(image, encoded):
            return "the JPEG file ends before the last pixels"
    return None


# ---- PNG


def _find_missing_rows(encoded: bytes) -> str | None:
    chunks = [*_iterate_chunks(encoded)]
    if not chunks or chunks[-1][0] != b"IEND":
        return "the PNG file has no end (chunk IEND)"
    header = next(content for name, content in chunks if name == b"IHDR")
    needed = _count_bytes(header)
    decompressor, size = zlib.decompressobj(), 0
    for name, content in chunks:
        while name == b"IDAT" and content and size < needed and not decompressor.eof:
            size += len(decompressor.decompress(content, _PIECE))
            content = decompressor.unconsumed_tail
    while size < needed and (piece := decompressor.decompress(decompressor.unconsumed_tail, _PIECE)):
        size += len(piece)
    return f"the PNG file has {size:,} of {needed:,} bytes of pixels" if size < needed else None


def _iterate_chunks(encoded: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the name and the content of each chunk of a PNG file, up to its end. A chunk that is cut off is not
    yielded."""
    place = 8
    while place + 12 <= len(encoded):
        length = int.from_bytes(encoded[place : place + 4])
        name, last = encoded[place + 4 : place + 8], place + 8 + length
        if last + 4 > len(encoded):
            return
        yield name, encoded[place + 8 : last]
        if name == b"IEND":
            return
        place = last + 4


def _count_bytes(header: bytes) -> int:
    """Return the size in bytes that the rows of a PNG file have before compression, according to its header chunk. Each
    row has one additional byte that names its filter."""
    width, height = int.from_bytes(header[:4]), int.from_bytes(header[4:8])
    bits, color, interlaced = header[8], header[9], header[12]
    num_bytes = 0
    for left, top, across, down in _PASSES if interlaced else ((0, 0, 1, 1),):
        columns, rows = -(-(width - left) // across), -(-(height - top) // down)
        if columns > 0 and rows > 0:
            num_bytes += rows * (1 + -(-columns * bits * _CHANNELS[color] // 8))
    return num_bytes


# ---- JPEG


def _ends_early(image: ImageFile.ImageFile, encoded: bytes) -> bool:
    """Return whether pixels are missing at the end of a JPEG file.

    The file is decoded again with other bytes in place of its end, which change pixels if data is missing. Decoders
    fill missing blocks of a sequential file with one color, so large files with details in the last block are not
    decoded again.
    """
    width, height = image.size
    if width * height > _SMALL and not image.info.get("progressive"):
        corner = (width - (width % _BLOCK or _BLOCK), height - (height % _BLOCK or _BLOCK), width, height)
        low, high = image.convert("L").crop(corner).getextrema()
        if isinstance(low, (int, float)) and isinstance(high, (int, float)) and high - low > _FLAT:
            return False
    end = encoded.rfind(_END)
    if end < 0:
        return True
    try:
        with open_image(encoded[:end] + _PROBE + _END) as other:
            return ImageChops.difference(other, image).getbbox() is not None
    except OSError:
        return True
