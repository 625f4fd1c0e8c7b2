"""Packing lists for the demo of preferences, in which one reward prefers long lists and another short ones. Torch-free.

Ada packs for Oslo on Monday: pen cup map
"""

from random import Random
from typing import Final

from infra.config import Positive
from infra.counts import format_count
from infra.errors import BadInput
from models.config.data import DataSource
from models.data.problems import Problem, sample_problems

NAMES: Final = (
    *("Ada", "Ben", "Cleo", "Dan", "Eva", "Fay", "Gus", "Ida"),
    *("Jan", "Kim", "Leo", "Max", "Ned", "Tom", "Uma", "Zoe"),
)
PLACES: Final = ("Bonn", "Bari", "Graz", "Kyiv", "Lima", "Nice", "Oslo", "Riga", "Rome", "York")
DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
THINGS: Final = ("bag", "cap", "cup", "hat", "jar", "key", "map", "net", "pad", "pen", "pin", "rug")
FEWEST, MOST = 4, 12
"""Minimum and maximum number of things in the packing lists on which warm-up trains."""


class ListData(DataSource):
    """Example of a user-defined data source: problems that ask for a packing list."""

    implementation = "models.data.lists:list_problems"

    train_problems: Positive = 384
    """Number of training problems."""
    heldout_problems: Positive = 64
    """Number of problems kept for evaluation. A hash of the prompt assigns each problem to training or evaluation, so
    no prompt is in both."""

    @property
    def num_heldout_problems(self) -> int | None:
        """Number of held-out problems, as configured."""
        return self.heldout_problems


def list_problems(data: ListData, split: str, seed: int) -> list[Problem]:
    """Generate the problems of a split ("train" or "heldout"), each with a reference list of 4 to 12 things. The same
    seed gives the same problems.

    Raises BadInput if there are not enough different problems.
    """
    num_problems = data.train_problems if split == "train" else data.heldout_problems
    rng = Random(f"{seed}/{split}/lists")
    problems = sample_problems(lambda source: _sample_problem(rng, source), split=split, wanted=num_problems)
    if len(problems) < num_problems:
        raise BadInput(
            f"data.{split}_problems is {num_problems}, but only {format_count(len(problems), 'different problem')} "
            f"could be generated. Lower data.{split}_problems."
        )
    return problems


def _sample_problem(rng: Random, source: str) -> Problem:
    """Sample one problem that asks for a packing list, with its reference list."""
    prompt = f"{rng.choice(NAMES)} packs for {rng.choice(PLACES)} on {rng.choice(DAYS)}:"
    things = rng.choices(THINGS, k=rng.randint(FEWEST, MOST))
    return Problem(source=source, prompt=prompt, answer="".join(f" {thing}" for thing in things))
