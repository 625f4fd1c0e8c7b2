"""Packing lists. One reward of the job prefers long lists, the other short ones.

Ada packs for Oslo on Monday: pen cup map
"""

from random import Random
from typing import Annotated, Final

from pydantic import Field

from rheostat.models.config.data import GeneratedData
from rheostat.models.data.generated import sample_problems
from rheostat.models.data.problems import Problem

NAMES: Final = (
    *("Ada", "Ben", "Cleo", "Dan", "Eva", "Fay", "Gus", "Ida"),
    *("Jan", "Kim", "Leo", "Max", "Ned", "Tom", "Uma", "Zoe"),
)
PLACES: Final = ("Bonn", "Bari", "Graz", "Kyiv", "Lima", "Nice", "Oslo", "Riga", "Rome", "York")
DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
THINGS: Final = ("bag", "cap", "cup", "hat", "jar", "key", "map", "net", "pad", "pen", "pin", "rug")
FEWEST, MOST = 4, 12
"""Minimum and maximum number of things in the packing lists on which warm-up trains."""


class ListData(GeneratedData):
    """Settings of the generated prompts."""

    implementation = "packing:list_problems"

    train_problems: Annotated[int, Field(ge=1)] = 384
    heldout_problems: Annotated[int, Field(ge=1)] = 64


def list_problems(data: ListData, split: str, seed: int) -> list[Problem]:
    """Generate the problems of a split ("train" or "heldout"), each with a reference list of 4 to 12 things. The same
    seed gives the same problems."""
    rng = Random(f"{seed}/{split}/lists")
    return sample_problems(data, lambda source: _sample_problem(rng, source), split)


def _sample_problem(rng: Random, source: str) -> Problem:
    """Sample one problem that asks for a packing list, with its reference list."""
    prompt = f"{rng.choice(NAMES)} packs for {rng.choice(PLACES)} on {rng.choice(DAYS)}:"
    things = rng.choices(THINGS, k=rng.randint(FEWEST, MOST))
    return Problem(source=source, prompt=prompt, answer="".join(f" {thing}" for thing in things))
