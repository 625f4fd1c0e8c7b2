"""Small generated pictures."""

import zlib
from collections.abc import Sequence
from io import BytesIO
from struct import pack

import numpy as np
from PIL import Image


def picture(colour: str = "red", size: tuple[int, int] = (24, 24), *, kind: str = "PNG") -> bytes:
    """Encode a picture of one colour."""
    sink = BytesIO()
    Image.new("RGB", size, colour).save(sink, kind)
    return sink.getvalue()


def animation() -> bytes:
    """Encode two frames."""
    sink = BytesIO()
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(sink, "GIF", save_all=True, append_images=frames[1:])
    return sink.getvalue()


def claiming(width: int, height: int) -> bytes:
    """Write the header of a PNG file that states these dimensions."""
    head = b"IHDR" + pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + pack(">I", 13) + head + pack(">I", zlib.crc32(head)) + pack(">I", 0) + b"IDAT"


def write_png(rows: Sequence[bytes], *, width: int, bits: int, color: int, **chunks: bytes) -> bytes:
    """Write a PNG file from its rows of samples. `color` is the color type, and `chunks` are written before them."""
    header = pack(">IIBBBBB", width, len(rows), bits, color, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    parts = {"IHDR": header, **chunks, "IDAT": pixels, "IEND": b""}
    return b"\x89PNG\r\n\x1a\n" + b"".join(_write_chunk(name.encode(), content) for name, content in parts.items())


def _write_chunk(name: bytes, content: bytes) -> bytes:
    return pack(">I", len(content)) + name + content + pack(">I", zlib.crc32(name + content))


def write_color_tiff(samples_YXC: np.ndarray) -> bytes:
    """Write a TIFF file of color with 16 bits per channel, in the order of bytes of the samples. The last of four
    channels is transparency."""
    height, width, channels = samples_YXC.shape
    order = ">" if samples_YXC.dtype.byteorder == ">" else "<"
    content = pack(f"{order}{channels}H", *[16] * channels) + samples_YXC.tobytes()
    tags = {256: (4, 1, width), 257: (4, 1, height), 258: (3, channels, 8), 259: (4, 1, 1), 262: (4, 1, 2)}
    tags |= {273: (4, 1, 8 + 2 * channels), 277: (4, 1, channels), 278: (4, 1, height)}
    tags |= {279: (4, 1, samples_YXC.nbytes)} | ({338: (4, 1, 2)} if channels == 4 else {})
    entries = b"".join(pack(f"{order}HHII", tag, *value) for tag, value in tags.items())
    head = (b"MM\0*" if order == ">" else b"II*\0") + pack(f"{order}I", 8 + len(content)) + content
    return head + pack(f"{order}H", len(tags)) + entries + pack(f"{order}I", 0)


def write_tiff(samples_YX: np.ndarray, *, bits: int, sample_format: int = 1, photometric: int = 1) -> bytes:
    """Write a gray TIFF file. Samples of 12 bits are packed, all others are written as they are."""
    height, width = samples_YX.shape
    content = samples_YX.tobytes()
    if bits == 12:
        pairs = samples_YX.reshape(-1, 2).tolist()
        content = b"".join(bytes([a >> 4, (a & 15) << 4 | b >> 8, b & 255]) for a, b in pairs)
    tags = {256: width, 257: height, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: height}
    tags |= {279: len(content), 339: sample_format}
    entries = b"".join(pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    head = b"II*\0" + pack("<I", 8 + len(content)) + content
    return head + pack("<H", len(tags)) + entries + pack("<I", 0)
