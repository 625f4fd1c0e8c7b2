"""Contents of the pictures: one square or circle in one of three colors, at one of four places on a dark background."""

from itertools import product
from typing import Final, NamedTuple

SIDE: Final = 8
"""Side length of a picture in pixels."""
COLOURS: Final = {"red": (230, 40, 40), "green": (40, 190, 60), "blue": (50, 80, 230)}
GROUND: Final = (20, 20, 20)
SHAPES: Final = ("square", "circle")
PLACES: Final = {"left": (0.25, 0.5), "right": (0.75, 0.5), "top": (0.5, 0.25), "bottom": (0.5, 0.75)}
"""Center of the shape for each place, as fractions: of the picture's width from the left, of its height from the
top."""
WORDINGS: Final = {"train": "{colour} {shape} {place}", "heldout": "{place} {colour} {shape}"}
"""Template of the prompts of each split. The splits use the same words but have no prompt in common."""


class Motif(NamedTuple):
    """Content of a picture: one shape, with its color and its place."""

    colour: str
    shape: str
    place: str

    @property
    def reference(self) -> str:
        """Reference answer for rewards: color, shape and place, in the same order for every wording of the prompt."""
        return " ".join(self)

    def prompt(self, split: str) -> str:
        """Return the prompt that describes this picture in a split ("train" or "heldout")."""
        return WORDINGS[split].format(**self._asdict())


MOTIFS: Final = tuple(Motif(*each) for each in product(COLOURS, SHAPES, PLACES))
"""All 24 contents: combinations of color, shape and place."""
