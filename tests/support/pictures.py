"""Small generated pictures."""

import zlib
from io import BytesIO
from struct import pack

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
