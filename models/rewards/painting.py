"""Reward that checks by the pixels whether a painting shows the requested color and place. Torch-free."""

import math
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import label

from models.config.reward_terms import PaintingReward
from models.data.paintings import COLOURS, GROUND, PLACES, SIDE
from models.vision.color_conversion import decode_rgb

REACH: Final = 0.14
"""Maximum distance between the shape's center and the requested place, in widths. Places are at least 0.35 apart."""


class PictureReward(Protocol):
    """Reward function that judges the last picture of a completion."""

    def __call__(self, prompt: str, completion: str, answer: str, /, *, images: Sequence[bytes] | None = None) -> float:
        """Return the reward, or NaN if `images` is None, in which case only the reference is checked."""
        ...


def painting_reward(config: PaintingReward) -> PictureReward:
    """Return a reward that is 1 if the picture shows one shape of the requested color at the requested place, else 0.

    The kind of shape is not checked.
    """

    def reward(prompt: str, completion: str, answer: str, *, images: Sequence[bytes] | None = None) -> float:
        """Judge the last picture. Raises ValueError if there is no picture or the reference is invalid."""
        colour, place = _read_motif(answer)
        if images is None:
            return math.nan
        if not images:
            raise ValueError("expected a picture, found none")
        return float(_detect_motif(_pixels(images[-1]), colour, place))

    return reward


def _read_motif(answer: str) -> tuple[str, str]:
    """Parse the color and the place from the reference. Raises ValueError if the reference is invalid."""
    match answer.split():
        case [colour, _, place] if colour in COLOURS and place in PLACES:
            return colour, place
    raise ValueError(f"no colour, shape and place, such as 'red square left', in the reference {answer[:60]!r}")


def _pixels(encoded: bytes) -> NDArray[np.float64]:
    """Decode a picture to shape (`SIDE`, `SIDE`, 3) with values from 0 to 255.

    Larger pictures are averaged block by block.

    Raises ValueError if the picture is not square or its side is not a multiple of `SIDE`.
    """
    levels = np.asarray(decode_rgb(encoded), np.float64)
    height, width, _ = levels.shape
    if height != width or height % SIDE:
        raise ValueError(f"expected a picture of {SIDE} x {SIDE} pixels or a multiple, found {width} x {height}")
    blocks: NDArray[np.float64] = levels.reshape(SIDE, height // SIDE, SIDE, width // SIDE, 3)
    means: NDArray[np.float64] = blocks.mean((1, 3))
    return means


def _detect_motif(pixels: NDArray[np.float64], colour: str, place: str) -> bool:
    """Return whether the pixels that differ from the ground form one connected shape of this color at this place.

    A pixel belongs to the shape if it is nearer to one of the colors than to the ground.
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
