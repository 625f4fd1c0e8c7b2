"""Reward that checks the pixels of a picture for a shape of the requested color at the requested place.

It runs in a process that imports nothing of Rheostat.
"""

from io import BytesIO
from typing import Final

import numpy as np
from motifs import COLOURS, GROUND, PLACES, SIDE
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import label

REACH: Final = 0.14
"""Maximum distance between the center of the shape and the requested place, as a fraction of the image's width. Places
are at least 0.35 apart."""


def painting(prompt: str, completion: str, answer: str, *, images: list[bytes]) -> float:
    """Return 1 if the last picture shows one shape of the requested color at the requested place, else 0. The kind of
    shape is not checked, and the reward is 0 without a picture.

    Raises ValueError if the reference answer names no color and place, or if the picture has an unexpected size.
    """
    colour, place = _read_motif(answer)
    return float(_detect_motif(_pixels(images[-1]), colour, place)) if images else 0.0


def _read_motif(answer: str) -> tuple[str, str]:
    """Return the requested color and place in a reference answer. Raises ValueError if the answer is invalid."""
    match answer.split():
        case [colour, _, place] if colour in COLOURS and place in PLACES:
            return colour, place
    raise ValueError(
        "the reward 'painting' needs a reference answer with a color, a shape and a place, such as 'red square left', "
        f"but the answer is {answer[:60]!r}"
    )


def _pixels(encoded: bytes) -> NDArray[np.float64]:
    """Decode an image to an array of shape (`SIDE`, `SIDE`, 3) with values from 0 to 255.

    Larger images are reduced by averaging blocks. Raises ValueError if the image is not square or its side is not a
    multiple of `SIDE`.
    """
    levels = np.asarray(Image.open(BytesIO(encoded)).convert("RGB"), np.float64)
    height, width, _ = levels.shape
    if height != width or height % SIDE:
        raise ValueError(
            f"the reward 'painting' scores square pictures whose side is a multiple of {SIDE} pixels, but this "
            f"picture has {width} x {height} pixels"
        )
    blocks: NDArray[np.float64] = levels.reshape(SIDE, height // SIDE, SIDE, width // SIDE, 3)
    means: NDArray[np.float64] = blocks.mean((1, 3))
    return means


def _detect_motif(pixels: NDArray[np.float64], colour: str, place: str) -> bool:
    """Return whether the pixels that differ from the background form one connected shape of this color at this place.

    A pixel belongs to the shape if its color is nearer to one of the known colors than to the background.
    """
    to_colours = np.linalg.norm(pixels[..., None, :] - np.array([*COLOURS.values()]), axis=-1)
    is_shape_YX = to_colours.min(-1) < np.linalg.norm(pixels - GROUND, axis=-1)
    if label(is_shape_YX)[1] != 1:
        return False
    mean = pixels[is_shape_YX].mean(0)
    nearest = min(COLOURS, key=lambda name: float(np.linalg.norm(mean - COLOURS[name])))
    rows, columns = np.nonzero(is_shape_YX)
    middle = np.array([columns.mean() + 0.5, rows.mean() + 0.5]) / SIDE
    return nearest == colour and bool(np.linalg.norm(middle - PLACES[place]) <= REACH)
