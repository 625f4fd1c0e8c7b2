"""A reward that looks whether a painting shows what was asked, by its pixels. Torch-free."""

import math
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import label

from models.config.reward_terms import PaintingReward
from models.data.paintings import COLOURS, GROUND, PLACES, SIDE
from models.vision.processor import open_image

REACH: Final = 0.14
"""How far the middle of what is shown may be from the asked place, in widths; places are 0.35 apart at least."""


class PictureReward(Protocol):
    """Judge the last picture of a completion."""

    def __call__(self, prompt: str, completion: str, answer: str, /, *, images: Sequence[bytes] | None = None) -> float:
        """Return the reward; NaN where no `images` are given, when only the reference is looked at."""
        ...


def painting_reward(config: PaintingReward) -> PictureReward:
    """Look for one blob of the asked colour at the asked place: 1 or 0. Of its shape nothing is asked."""

    def reward(prompt: str, completion: str, answer: str, *, images: Sequence[bytes] | None = None) -> float:
        colour, place = _asked(answer)
        if images is None:
            return math.nan
        if not images:
            raise ValueError("expected a picture, found none")
        return float(_shows(_pixels(images[-1]), colour, place))

    return reward


def _asked(answer: str) -> tuple[str, str]:
    match answer.split():
        case [colour, _, place] if colour in COLOURS and place in PLACES:
            return colour, place
    raise ValueError(f"no colour, shape and place, such as 'red square left', in the reference {answer[:60]!r}")


def _pixels(encoded: bytes) -> NDArray[np.float64]:
    """Read a picture, SIDE x SIDE x 3 from 0 to 255; one that is shown larger becomes means of its blocks."""
    levels = np.asarray(open_image(encoded), np.float64)
    height, width, _ = levels.shape
    if height != width or height % SIDE:
        raise ValueError(f"expected a picture of {SIDE} x {SIDE} pixels or a multiple, found {width} x {height}")
    blocks: NDArray[np.float64] = levels.reshape(SIDE, height // SIDE, SIDE, width // SIDE, 3)
    means: NDArray[np.float64] = blocks.mean((1, 3))
    return means


def _shows(pixels: NDArray[np.float64], colour: str, place: str) -> bool:
    """Say whether what is nearer to a colour than to the ground is one blob of this colour at this place."""
    to_colours = np.linalg.norm(pixels[..., None, :] - np.array([*COLOURS.values()]), axis=-1)
    shown_YX = to_colours.min(-1) < np.linalg.norm(pixels - GROUND, axis=-1)
    if label(shown_YX)[1] != 1:
        return False
    mean = pixels[shown_YX].mean(0)
    nearest = min(COLOURS, key=lambda name: float(np.linalg.norm(mean - COLOURS[name])))
    rows, columns = np.nonzero(shown_YX)
    middle = np.array([columns.mean() + 0.5, rows.mean() + 0.5]) / SIDE
    return nearest == colour and bool(np.linalg.norm(middle - PLACES[place]) <= REACH)
