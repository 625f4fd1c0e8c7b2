"""Pictures of colored shapes to count, for vision-language policies.

A picture has 3 x 3 cells. Each cell is empty or contains a circle, a square or a cross in one of four colors. The
worked answer to "How many red?" reads the cells row by row, each with the count so far:

    .0 .0 O0 O0 S0 S0 .0 X1 X2 #### 2

A bare guess is right about one time in seven. A worked answer is right if the cells are read correctly.
"""

from io import BytesIO
from random import Random
from typing import Annotated, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field

from rheostat.models.config.data import GeneratedData
from rheostat.models.data.generated import sample_problems
from rheostat.models.data.problems import Problem

CELLS: Final = 3
CELL: Final = 8
"""Number of cells along a side of a picture (`CELLS`), and side length of a cell in pixels (`CELL`)."""
COLOURS: Final = {"red": (230, 40, 40), "green": (40, 190, 60), "blue": (50, 80, 230), "yellow": (235, 210, 40)}
COMMON: Final = (0.5, 0.25, 0.15, 0.1)
"""Probability of each color, for shapes and for questions. With equal probabilities, neither the color of a shape nor
the color in the question would alone say anything about the answer, so training would start without gradients."""
GROUND: Final = (20, 20, 20)
EMPTY_SHARE: Final = 0.25
"""Share of cells without a shape."""

Cell = tuple[str, str] | None
"""Shape and color of a cell, or None if the cell is empty."""


def _masks() -> dict[str, NDArray[np.bool_]]:
    """Return the pixels that each shape covers, by the letter of the shape ("O", "S", "X"), as boolean arrays of shape
    (`CELL`, `CELL`)."""
    y_YX, x_YX = np.mgrid[:CELL, :CELL] - (CELL - 1) / 2
    inside = np.maximum(abs(x_YX), abs(y_YX)) < CELL / 2 - 1
    return {
        "O": x_YX**2 + y_YX**2 < (CELL / 2 - 0.7) ** 2,
        "S": inside,
        "X": inside & (np.minimum(abs(x_YX - y_YX), abs(x_YX + y_YX)) < 1.5),
    }


MASKS: Final = _masks()
"""Pixels of a cell that each shape covers, by the letter of the shape."""


class PicturesData(GeneratedData):
    """Settings of the generated questions about pictures."""

    implementation = "pictures:picture_problems"
    guess_template = " #### {}"
    max_guess = 9

    train_problems: Annotated[int, Field(ge=1)] = 3072


def picture_problems(data: PicturesData, split: str, seed: int) -> list[Problem]:
    """Generate the problems of a split ("train" or "heldout"). No two problems ask the same question about the same
    picture, and the same seed gives the same problems."""
    rng = Random(f"{seed}/{split}/pictures")
    return sample_problems(data, lambda source: _sample_problem(rng, source), split)


def _sample_problem(rng: Random, source: str) -> Problem:
    """Sample one problem with its picture and its worked answer, which lists the cells with the count of shapes so
    far."""
    target_colour = _colour(rng)
    cells = [_cell(rng) for _ in range(CELLS**2)]
    count, work = 0, []
    for cell in cells:
        count += cell is not None and cell[1] == target_colour
        work.append(f"{'.' if cell is None else cell[0]}{count}")
    answer = f"#### {count}"
    # Each word of the worked answer starts with its space, like a token.
    return Problem(
        source=source,
        prompt=f"How many {target_colour}?",
        answer=f" {answer}",
        worked=f" {' '.join((*work, answer))}",
        images=(draw_cells(cells),),
    )


def _cell(rng: Random) -> Cell:
    """Sample the content of one cell: a shape with its color, or None."""
    return None if rng.random() < EMPTY_SHARE else (rng.choice(list(MASKS)), _colour(rng))


def _colour(rng: Random) -> str:
    """Sample a color with the probabilities in `COMMON`."""
    return rng.choices(list(COLOURS), COMMON)[0]


def draw_cells(cells: list[Cell]) -> bytes:
    """Draw the cells of a picture, which are listed row by row, and encode the picture as PNG."""
    pixels = np.full((CELLS * CELL, CELLS * CELL, 3), GROUND, np.uint8)
    for place, cell in enumerate(cells):
        if cell is not None:
            top, left = (CELL * each for each in divmod(place, CELLS))
            pixels[top : top + CELL, left : left + CELL][MASKS[cell[0]]] = COLOURS[cell[1]]
    sink = BytesIO()
    Image.fromarray(pixels).save(sink, "PNG", optimize=False, compress_level=9)
    return sink.getvalue()
