"""Right and wrong completions of problems, for models that learn to tell them apart. Torch-free."""

import re
from collections.abc import Sequence
from random import Random
from typing import Final

from models.data.problems import Problem

_NUMBER: Final = re.compile(r"\d+")
_STEP: Final = re.compile(r"(\d+)([+-])(\d+)=(\d+)")
_BROKEN_SHARE: Final = 0.1  # of wrong completions that are no answer at all: cut short, or without a number


def right_completion(problem: Problem, rng: Random) -> str:
    """Give the reference answer, worked half of the time where that is known."""
    return _shortened(problem.worked or problem.answer, rng)


def wrong_completion(problem: Problem, problems: Sequence[Problem], rng: Random) -> str:
    """Make a completion that ends in another answer, or before it."""
    if rng.random() < _BROKEN_SHARE:
        return _broken(problem, rng)
    draw = rng.random()
    if problem.worked is None:
        other = rng.choice(problems).answer
        return other if other != problem.answer and draw < 0.5 else _other_number(problem.answer, rng)
    return _shortened(_slipped(problem.worked, rng) if draw < 0.5 else _other_number(problem.worked, rng), rng)


def _shortened(worked: str, rng: Random) -> str:
    """Leave out all steps half of the time: what is learnt of short texts carries over to long ones."""
    steps = list(_STEP.finditer(worked))
    return worked[steps[-1].end() :].lstrip() if steps and rng.random() < 0.5 else worked


def _broken(problem: Problem, rng: Random) -> str:
    """Stop before the answer: at the latest before the last number."""
    text = problem.worked or problem.answer
    numbers = list(_NUMBER.finditer(text))
    end = numbers[-1].start() if numbers else 0
    return text[: rng.randint(1, end)] if end else "I do not know."


def _slipped(worked: str, rng: Random) -> str:
    """Get one step wrong and go on from there, so that the answer is wrong too."""
    steps = list(_STEP.finditer(worked))
    at = rng.randrange(len(steps))
    results = [int(step[4]) for step in steps]
    slips = [slip for slip in range(-5, 6) if slip and min(results[at:]) + slip >= 0 and max(results[at:]) + slip <= 20]
    if not slips:
        return _other_number(worked, rng)
    slip = rng.choice(slips)
    shown = [
        f"{int(step[1]) + slip * (index > at)}{step[2]}{step[3]}={results[index] + slip * (index >= at)}"
        for index, step in enumerate(steps)
    ]
    return " ".join((*shown, f"#### {results[-1] + slip}"))


def _other_number(text: str, rng: Random) -> str:
    """Replace the last number by another of its size; a text without a number says nothing."""
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return f"not {text}"
    last = numbers[-1]
    limit = max(20, 2 * int(last[0]))
    other = rng.choice([number for number in _nearby(int(last[0]), limit, rng) if number != int(last[0])])
    return text[: last.start()] + str(other) + text[last.end() :]


def _nearby(number: int, limit: int, rng: Random) -> list[int]:
    return [rng.randint(0, limit) for _ in range(4)] + [number + 1]
