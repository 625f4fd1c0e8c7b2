"""Pictures beside each other on one sheet, with what each earned. Torch-free.

The same pictures make the same sheet, byte for byte, with one version of Pillow.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Final

from PIL import Image, ImageDraw, ImageFont, ImageOps

from models.data.images import open_picture

GAP: Final = 8
"""Pixels around each picture."""
LINE: Final = 18
"""Pixels of a line of text."""
TEXT: Final = 12
"""Height of letters in pixels."""
PAPER, INK, QUIET, EMPTY = "#ffffff", "#1a1a1a", "#6b6b6b", "#e4e4e4"


@dataclass(frozen=True, slots=True)
class SheetPicture:
    """A picture and what it earned."""

    encoded: bytes
    reward: float | None
    """Total reward; none if it is missing."""


@dataclass(frozen=True, slots=True)
class SheetRow:
    """A prompt and its pictures, of which there is at least one."""

    prompt: str
    pictures: tuple[SheetPicture, ...]


@dataclass(frozen=True, slots=True)
class _Line:
    """Pictures that stand beside each other, and the prompt above them, if they are its first."""

    prompt: str | None
    pictures: tuple[SheetPicture, ...]

    def height(self, side: int) -> int:
        return side + LINE + GAP + (0 if self.prompt is None else LINE)


def contact_sheet(rows: Sequence[SheetRow], *, columns: int, side: int) -> bytes:
    """Draw the pictures of each row in lines of `columns`, in squares of `side` pixels, as a PNG file.

    Each row begins with its prompt, cut to one line; below each picture stands its reward. Small pictures are enlarged
    by a whole factor, pixel by pixel. Raises BadInput where one cannot be decoded.
    """
    lines = [*_lines(rows, columns)]
    widest = max(len(line.pictures) for line in lines)
    size = (GAP + widest * (side + GAP), GAP + sum(line.height(side) for line in lines))
    sheet = Image.new("RGB", size, PAPER)
    top = GAP
    for line in lines:
        _draw_line(sheet, line, top=top, side=side)
        top += line.height(side)
    sink = BytesIO()
    sheet.save(sink, "PNG", compress_level=9)
    return sink.getvalue()


def _lines(rows: Sequence[SheetRow], columns: int) -> Iterator[_Line]:
    for row in rows:
        for number in range(0, len(row.pictures), columns):
            yield _Line(None if number else row.prompt, row.pictures[number : number + columns])


def _draw_line(sheet: Image.Image, line: _Line, *, top: int, side: int) -> None:
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(TEXT)
    if line.prompt is not None:
        draw.text((GAP, top), _cut(line.prompt, font, sheet.width - 2 * GAP), fill=INK, font=font)
        top += LINE
    for number, picture in enumerate(line.pictures):
        left = GAP + number * (side + GAP)
        draw.rectangle((left, top, left + side - 1, top + side - 1), fill=EMPTY)
        shown = _fitted(open_picture(picture.encoded), side)
        sheet.paste(shown, (left + (side - shown.width) // 2, top + (side - shown.height) // 2))
        told = "missing" if picture.reward is None else f"{picture.reward:.4g}"
        draw.text((left, top + side + 1), _cut(told, font, side), fill=QUIET, font=font)


def _fitted(image: Image.Image, side: int) -> Image.Image:
    factor = side // max(image.size)
    if factor:
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    return ImageOps.contain(image, (side, side), Image.Resampling.LANCZOS)


def _cut(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    """Put a text on one line of so many pixels; one that is longer ends in `…`."""
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in text[:1000]).split())
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"{text}…") > width:
        text = text[:-1]
    return f"{text}…"
