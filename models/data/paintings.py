"""Pictures to be painted, for a demo of policies that draw and learn on a laptop.

A picture has 8 x 8 pixels, and on a dark ground one square or circle of 3 or 4 pixels across, in one of three colours,
at one of four places. Each of the 24 is asked to learn from as "red square left" and to be measured as "left red
square". Torch-free.
"""

from io import BytesIO
from itertools import product
from random import Random
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from models.config.data import PaintingsData
from models.data.problems import Problem

SIDE: Final = 8
"""Pixels of a picture's side."""
COLOURS: Final = {"red": (230, 40, 40), "green": (40, 190, 60), "blue": (50, 80, 230)}
GROUND: Final = (20, 20, 20)
SHAPES: Final = ("square", "circle")
PLACES: Final = {"left": (0.25, 0.5), "right": (0.75, 0.5), "top": (0.5, 0.25), "bottom": (0.5, 0.75)}
"""Where the middle of the shape is, in widths from the left and from the top."""
WORDINGS: Final = {"train": "{colour} {shape} {place}", "heldout": "{place} {colour} {shape}"}
"""How a picture is asked, by split: no prompt is in both, and no word in one alone."""
SHADE: Final = 25
"""By how much a channel of the colour differs from one picture to the next, at most, of 255."""


class Motif(NamedTuple):
    """What a picture shows."""

    colour: str
    shape: str
    place: str

    @property
    def facts(self) -> str:
        """The reference answer, whatever the wording."""
        return " ".join(self)

    def asked(self, split: str) -> str:
        """Ask for it as a split does."""
        return WORDINGS[split].format(**self._asdict())


class Captioned(NamedTuple):
    """A picture, and what it is said to show."""

    caption: str
    pixels: NDArray[np.float32]
    """8 x 8 x 3, from -1 to 1."""


MOTIFS: Final = tuple(Motif(*each) for each in product(COLOURS, SHAPES, PLACES))
"""All that can be asked."""


def painting_problems(data: PaintingsData, split: str, seed: int) -> list[Problem]:
    """Ask for each picture once, in an order of the seed's."""
    order = Random(f"{seed}/{split}/paintings").sample(MOTIFS, k=len(MOTIFS))
    return [
        Problem(source=f"{split} problem {number}", prompt=motif.asked(split), answer=motif.facts)
        for number, motif in enumerate(order)
    ]


def pretraining_examples(data: PaintingsData, count: int, seed: int) -> list[Captioned]:
    """Paint so many pictures, captioned in either wording; the same seed gives the same ones.

    Of the share that lies, colour and place of the caption are drawn anew, so some of them are true by chance.
    """
    rng = Random(f"{seed}/pretraining/paintings")
    found = []
    for _ in range(count):
        said = shown = rng.choice(MOTIFS)
        if rng.random() < data.lies:
            said = Motif(rng.choice([*COLOURS]), shown.shape, rng.choice([*PLACES]))
        caption = said.asked(rng.choice([*WORDINGS]))
        found.append(Captioned(caption, painted(*shown, rng)))
    return found


def painted(colour: str, shape: str, place: str, rng: Random) -> NDArray[np.float32]:
    """Paint a picture, 8 x 8 x 3 from -1 to 1; size, shade and the last half pixel of its place are the generator's."""
    across = rng.choice((3, 4))
    middle = [SIDE * part for part in PLACES[place]]
    # A shape of 3 pixels cannot have its middle between two of them: it lies half a pixel to either side.
    left, top = (round(at - across / 2 + (rng.choice((-0.5, 0.5)) if across % 2 else 0)) for at in middle)
    y_YX, x_YX = np.mgrid[:SIDE, :SIDE] + 0.5
    x_YX, y_YX = abs(x_YX - left - across / 2), abs(y_YX - top - across / 2)
    if shape == "circle":
        inside_YX = x_YX**2 + y_YX**2 < (across / 2 - 0.2) ** 2
    else:
        inside_YX = np.maximum(x_YX, y_YX) < across / 2
    pixels = np.full((SIDE, SIDE, 3), GROUND, np.float32)
    pixels[inside_YX] = [np.clip(each + rng.uniform(-SHADE, SHADE), 0, 255) for each in COLOURS[colour]]
    return pixels / np.float32(127.5) - np.float32(1)


def pretraining_pictures(data: PaintingsData, count: int, seed: int) -> list[tuple[str, bytes]]:
    """Caption so many pictures, each a PNG file."""
    return [(each.caption, _encoded(each.pixels)) for each in pretraining_examples(data, count, seed)]


def _encoded(pixels_YXC: NDArray[np.float32]) -> bytes:
    sink = BytesIO()
    scaled = np.rint((pixels_YXC + 1) * 127.5).astype(np.uint8)
    Image.fromarray(scaled).save(sink, "PNG", optimize=False, compress_level=6)
    return sink.getvalue()
