"""Templated word problems with additions and subtractions, for a demo that learns on a laptop.

    Ana has 16 pens, buys 3, sells 4, finds 2, loses 1. How many?
    16+3=19 19-4=15 15+2=17 17-1=16 #### 16

A guess is right one time in twenty, a worked answer almost always: the policy earns its reward by learning to work.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from infra.errors import BadInput
from models.config import ArithmeticData
from models.data.problems import Problem, is_heldout

NAMES = ("Ana", "Ben", "Eva", "Ian", "Lea", "Max", "Tom", "Zoe")
THINGS = ("books", "coins", "cups", "eggs", "keys", "nuts", "pens", "toys")
GAINS = ("buys", "finds")
LOSSES = ("sells", "loses")
LARGEST_TOTAL = 20  # every running total is one token, and few enough to be learnt in seconds
LARGEST_STEP = 5
HELDOUT_SHARE = 0.1
MAX_FRUITLESS_DRAWS = 5000  # one draw in ten is a held-out question; so many in a row mean that they have run out


def arithmetic_problems(data: ArithmeticData, split: str, seed: int) -> list[Problem]:
    """Make the split's problems: different questions, the same list for the same seed."""
    wanted = data.train_problems if split == "train" else data.heldout_problems
    rng = Random(f"{seed}/{split}/{data.operations}")
    found: dict[str, Problem] = {}
    fruitless = 0
    while len(found) < wanted and fruitless < MAX_FRUITLESS_DRAWS:
        problem = _draw(rng, data.operations, source=f"{split} problem {len(found)}")
        text = str(problem.prompt)
        is_new = text not in found and is_heldout(text, HELDOUT_SHARE) == (split == "heldout")
        fruitless = 0 if is_new else fruitless + 1
        if is_new:
            found[text] = problem
    if len(found) < wanted:
        raise BadInput(
            f"data.{split}_problems = {wanted}: only {len(found)} different questions with "
            f"{data.operations} operations were found; ask for fewer or for more operations"
        )
    return list(found.values())


def bare_guess(rng: Random) -> str:
    """Answer without working: plausible and mostly wrong."""
    return f"#### {rng.randint(0, LARGEST_TOTAL)}"


@dataclass(frozen=True, slots=True)
class _Step:
    sign: int
    amount: int


def _draw(rng: Random, operations: int, *, source: str) -> Problem:
    start = rng.randint(1, LARGEST_TOTAL)
    steps = list(_steps(rng, start, operations))
    deeds = ", ".join(f"{rng.choice(GAINS if step.sign > 0 else LOSSES)} {step.amount}" for step in steps)
    question = f"{rng.choice(NAMES)} has {start} {rng.choice(THINGS)}, {deeds}. How many?\n"
    total, work = start, []
    for step in steps:
        after = total + step.sign * step.amount
        work.append(f"{total}{'+' if step.sign > 0 else '-'}{step.amount}={after}")
        total = after
    answer = f"#### {total}"
    return Problem(source=source, prompt=question, answer=answer, worked=" ".join((*work, answer)))


def _steps(rng: Random, start: int, operations: int) -> Iterator[_Step]:
    """Draw steps that keep the running total between 0 and its largest value."""
    total = start
    for _ in range(operations):
        signs = [sign for sign in (1, -1) if 0 <= total + sign <= LARGEST_TOTAL]
        sign = rng.choice(signs)
        room = LARGEST_TOTAL - total if sign > 0 else total
        step = _Step(sign, rng.randint(1, min(LARGEST_STEP, room)))
        total += step.sign * step.amount
        yield step
