"""Word problems with additions and subtractions, generated from templates and a seed, for jobs that train on a laptop.

    Ana has 16 pens, buys 3, sells 4, finds 2, loses 1. How many?
    16+3=19 19-4=15 15+2=17 17-1=16 #### 16

A guess is right about one time in twenty, and an answer with intermediate steps almost always, so the policy earns
rewards by learning to write the steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Annotated

from pydantic import Field

from rheostat.models.config.data import GeneratedData
from rheostat.models.data.generated import sample_problems
from rheostat.models.data.problems import Problem

NAMES = ("Ana", "Ben", "Eva", "Ian", "Lea", "Max", "Tom", "Zoe")

THINGS = ("books", "coins", "cups", "eggs", "keys", "nuts", "pens", "toys")

GAINS = ("buys", "finds")

LOSSES = ("sells", "loses")

LARGEST_TOTAL = 20  # every running total is one token, and the range is small enough to learn in seconds

LARGEST_STEP = 5


class ArithmeticData(GeneratedData):
    """Settings of the generated word problems."""

    implementation = "arithmetic:arithmetic_problems"
    makes_pairs = True

    operations: Annotated[int, Field(ge=1, le=8)] = 4
    """Number of additions or subtractions per problem."""


def arithmetic_problems(data: ArithmeticData, split: str, seed: int) -> list[Problem]:
    """Generate the word problems of a split ("train" or "heldout"). Questions are distinct, and the same seed gives the
    same list.

    Raises BadInput if there are not enough different questions.
    """
    rng = Random(f"{seed}/{split}/{data.operations}")
    return sample_problems(
        data,
        lambda source: _sample_problem(rng, data.operations, source=source),
        split,
        size_key="data.options.operations",
    )


@dataclass(frozen=True, slots=True)
class _Step:
    """One purchase, sale, find or loss in a word problem, which changes the number of things."""

    sign: int
    amount: int


def _sample_problem(rng: Random, operations: int, *, source: str) -> Problem:
    """Sample one word problem with its worked solution, which contains the intermediate steps and ends in the reference
    answer."""
    start = rng.randint(1, LARGEST_TOTAL)
    steps = list(_sample_steps(rng, start, operations))
    deeds = ", ".join(f"{rng.choice(GAINS if step.sign > 0 else LOSSES)} {step.amount}" for step in steps)
    question = f"{rng.choice(NAMES)} has {start} {rng.choice(THINGS)}, {deeds}. How many?\n"
    total, work = start, []
    for step in steps:
        after = total + step.sign * step.amount
        work.append(f"{total}{'+' if step.sign > 0 else '-'}{step.amount}={after}")
        total = after
    answer = f"#### {total}"
    return Problem(source=source, prompt=question, answer=answer, worked=" ".join((*work, answer)))


def _sample_steps(rng: Random, start: int, operations: int) -> Iterator[_Step]:
    """Sample `operations` changes of a total that begins at `start` and stays between 0 and `LARGEST_TOTAL`."""
    total = start
    for _ in range(operations):
        signs = [sign for sign in (1, -1) if 0 <= total + sign <= LARGEST_TOTAL]
        sign = rng.choice(signs)
        room = LARGEST_TOTAL - total if sign > 0 else total
        step = _Step(sign, rng.randint(1, min(LARGEST_STEP, room)))
        total += step.sign * step.amount
        yield step
