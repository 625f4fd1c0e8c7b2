"""Questions about a measure that the prompt omits, so that the policy must ask the simulated user first.

    Cleo needs a lid. How wide?
    width?                        the policy's first turn
    17                            the simulated user's reply, who knows `width` and `height`
    #### 17                       the policy's second turn

A guess is almost never right. An answer after the right question can always be right.
"""

from random import Random
from typing import Final

from rheostat.models.config.data import GeneratedData
from rheostat.models.data.generated import sample_problems
from rheostat.models.data.problems import Problem

NAMES: Final = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Max", "Tom", "Zoe")
THINGS: Final = ("box", "door", "frame", "lid", "sail", "shelf", "tent", "window")
ADJECTIVES: Final = {"width": "wide", "height": "high"}
"""Adjective in the question for each measure: "How wide?" asks for the width."""
SMALLEST, LARGEST = 2, 40


class MeasuresData(GeneratedData):
    """Settings of the generated questions."""

    implementation = "measures:measure_problems"
    max_guess = 40


def measure_problems(data: MeasuresData, split: str, seed: int) -> list[Problem]:
    """Generate the problems of a split ("train" or "heldout"). Problems differ in their question or in the measures
    that the simulated user knows. The same seed gives the same problems."""
    rng = Random(f"{seed}/{split}/measures")
    return sample_problems(data, lambda source: _sample_problem(rng, source), split)


def _sample_problem(rng: Random, source: str) -> Problem:
    """Sample one problem with its worked dialogue: the policy's question, the simulated user's reply, and the
    answer."""
    width, height = rng.sample(range(SMALLEST, LARGEST + 1), k=2)
    columns = {"width": width, "height": height}
    measure = rng.choice(list(columns))
    question = f"{rng.choice(NAMES)} needs a {rng.choice(THINGS)}. How {ADJECTIVES[measure]}?\n"
    answer = f"#### {columns[measure]}"
    turns = (f"{measure}?", f"\n{columns[measure]}\n", answer)
    return Problem(
        source=source, prompt=question, answer=answer, worked="".join(turns), worked_turns=turns, columns={**columns}
    )
