"""Contact sheet: one image that shows several pictures side by side, each with its reward. Torch-free.

The same pictures give the same sheet, byte for byte, with the same version of Pillow.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Final

from PIL import Image, ImageDraw, ImageFont, ImageOps

from rheostat.models.data.images import open_picture

GAP: Final = 8
"""Space around each picture of a contact sheet in pixels."""
LINE: Final = 18
"""Height of a line of text on a contact sheet in pixels."""
TEXT: Final = 12
"""Font size of the texts on a contact sheet in pixels."""
PAPER, INK, QUIET, EMPTY = "#ffffff", "#1a1a1a", "#6b6b6b", "#e4e4e4"


@dataclass(frozen=True, slots=True)
class SheetPicture:
    """Picture on a contact sheet, with the reward that is written below."""

    encoded: bytes
    """Bytes of an image file, such as a PNG."""
    reward: float | None
    """Total reward of the picture, or None if it is missing."""


@dataclass(frozen=True, slots=True)
class SheetRow:
    """Prompt on a contact sheet, with at least one picture that was generated for it."""

    prompt: str
    pictures: tuple[SheetPicture, ...]


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of a contact sheet, with pictures side by side. `prompt` is the text above them, or None if the line
    continues the pictures of the line before."""

    prompt: str | None
    pictures: tuple[SheetPicture, ...]

    def height(self, side: int) -> int:
        """Return the height of the line in pixels. `side` is the width and height of a picture."""
        return side + LINE + GAP + (0 if self.prompt is None else LINE)


def contact_sheet(rows: Sequence[SheetRow], *, columns: int, side: int) -> bytes:
    """Return a PNG image that shows generated pictures, up to `columns` in a line, each scaled to fit a square of
    `side` pixels. Each row starts with its prompt, cut to one line. The reward is written below each picture. Raises
    BadInput if a picture cannot be decoded.

    Small pictures are enlarged by an integer factor without smoothing.
    """
    lines = [*_split_into_lines(rows, columns)]
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


def _split_into_lines(rows: Sequence[SheetRow], columns: int) -> Iterator[_Line]:
    """Split each row of pictures into lines of at most `columns` pictures."""
    for row in rows:
        for number in range(0, len(row.pictures), columns):
            yield _Line(None if number else row.prompt, row.pictures[number : number + columns])


def _draw_line(sheet: Image.Image, line: _Line, *, top: int, side: int) -> None:
    """Draw one line of pictures with its texts onto the sheet. `top` and `side` are in pixels."""
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(TEXT)
    if line.prompt is not None:
        draw.text((GAP, top), _shorten_text(line.prompt, font, sheet.width - 2 * GAP), fill=INK, font=font)
        top += LINE
    for number, picture in enumerate(line.pictures):
        left = GAP + number * (side + GAP)
        draw.rectangle((left, top, left + side - 1, top + side - 1), fill=EMPTY)
        thumbnail = _fit_to_square(open_picture(picture.encoded), side)
        sheet.paste(thumbnail, (left + (side - thumbnail.width) // 2, top + (side - thumbnail.height) // 2))
        label = "missing" if picture.reward is None else f"{picture.reward:.4g}"
        draw.text((left, top + side + 1), _shorten_text(label, font, side), fill=QUIET, font=font)


def _fit_to_square(image: Image.Image, side: int) -> Image.Image:
    """Resize an image to fit a square of `side` pixels, by an integer factor if it is enlarged."""
    factor = side // max(image.size)
    if factor:
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    return ImageOps.contain(image, (side, side), Image.Resampling.LANCZOS)


def _shorten_text(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    """Shorten a text to one line of at most `width` pixels. A shortened text ends in `…`."""
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in text[:1000]).split())
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"{text}…") > width:
        text = text[:-1]
    return f"{text}…"
