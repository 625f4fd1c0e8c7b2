"""Pictures of 8 x 8 pixels that a text-to-image policy learns to generate, and the pictures on which warm-up trains it.

Training prompts describe a picture as "red square left", held-out prompts as "left red square".
"""

from io import BytesIO
from random import Random
from typing import Annotated, Final, NamedTuple

import numpy as np
from motifs import COLOURS, GROUND, MOTIFS, PLACES, SIDE, WORDINGS, Motif
from numpy.typing import NDArray
from PIL import Image

from rheostat.infra.config import Fraction
from rheostat.infra.renamed import RenamedFrom
from rheostat.models.config.data import DataSource
from rheostat.models.data.problems import Problem

SHADE: Final = 25
"""Maximum random change of a color channel, on a scale of 0 to 255."""


class PaintingsData(DataSource):
    """Settings of the pictures."""

    implementation = "paintings:painting_problems"
    pictures = "paintings:pretraining_pictures"

    caption_noise: Annotated[Fraction, RenamedFrom("lies")] = 0.5
    """Share of wrong captions (random color and place) among the pictures on which warm-up trains."""

    @property
    def num_heldout_problems(self) -> int | None:
        """Number of held-out problems: one for each of the 24 pictures."""
        return len(MOTIFS)


class Captioned(NamedTuple):
    """Generated picture with its caption, which may be wrong."""

    caption: str
    pixels: NDArray[np.float32]
    """Pixels of shape (8, 8, 3) with values from -1 to 1."""


def painting_problems(data: PaintingsData, split: str, seed: int) -> list[Problem]:
    """Return one problem for each possible picture, in a random order that depends on the seed and the split."""
    order = Random(f"{seed}/{split}/paintings").sample(MOTIFS, k=len(MOTIFS))
    return [
        Problem(source=f"{split} problem {number}", prompt=motif.prompt(split), answer=motif.reference)
        for number, motif in enumerate(order)
    ]


def pretraining_examples(data: PaintingsData, count: int, seed: int) -> list[Captioned]:
    """Paint `count` random pictures, each with a caption in a random word order. The same seed gives the same pictures.

    In a share of the captions (`data.caption_noise`), color and place are replaced by random ones. Some of these are
    right by chance.
    """
    rng = Random(f"{seed}/pretraining/paintings")
    examples = []
    for _ in range(count):
        described = motif = rng.choice(MOTIFS)
        if rng.random() < data.caption_noise:
            described = Motif(rng.choice([*COLOURS]), motif.shape, rng.choice([*PLACES]))
        caption = described.prompt(rng.choice([*WORDINGS]))
        examples.append(Captioned(caption, paint(*motif, rng)))
    return examples


def paint(colour: str, shape: str, place: str, rng: Random) -> NDArray[np.float32]:
    """Paint one shape with random size and shade, as an array of shape (8, 8, 3) with values from -1 to 1.

    A shape of 3 pixels is also randomly shifted by half a pixel.
    """
    across = rng.choice((3, 4))
    middle = [SIDE * part for part in PLACES[place]]
    # A shape of 3 pixels cannot be centered between two pixels, so it is shifted by half a pixel.
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
    """Return `count` captions, each with a picture that is encoded as PNG. Some captions are wrong."""
    return [(each.caption, _encode_png(each.pixels)) for each in pretraining_examples(data, count, seed)]


def _encode_png(pixels_YXC: NDArray[np.float32]) -> bytes:
    """Encode an array of pixels (height x width x 3, values from -1 to 1) as PNG."""
    sink = BytesIO()
    scaled = np.rint((pixels_YXC + 1) * 127.5).astype(np.uint8)
    Image.fromarray(scaled).save(sink, "PNG", optimize=False, compress_level=6)
    return sink.getvalue()
