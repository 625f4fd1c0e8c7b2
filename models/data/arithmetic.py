"""Templated word problems with additions and subtractions, for a demo that learns on a laptop.

    Ana has 16 pens, buys 3, sells 4, finds 2, loses 1. How many?
    16+3=19 19-4=15 15+2=17 17-1=16 #### 16

A guess is right one time in twenty, a worked answer almost always: the policy earns its reward by learning to work.
Right and wrong completions of them teach models that tell one from the other. Torch-free.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from infra.errors import BadInput
from models.config.data import ArithmeticData
from models.data.problems import Problem, draw_problems

NAMES = ("Ana", "Ben", "Eva", "Ian", "Lea", "Max", "Tom", "Zoe")

THINGS = ("books", "coins", "cups", "eggs", "keys", "nuts", "pens", "toys")

GAINS = ("buys", "finds")

LOSSES = ("sells", "loses")

LARGEST_TOTAL = 20  # every running total is one token, and few enough to be learnt in seconds

LARGEST_STEP = 5


def arithmetic_problems(data: ArithmeticData, split: str, seed: int) -> list[Problem]:
    """Make the split's problems: different questions, the same list for the same seed."""
    wanted = data.train_problems if split == "train" else data.heldout_problems
    rng = Random(f"{seed}/{split}/{data.operations}")
    found = draw_problems(lambda source: _draw(rng, data.operations, source=source), split=split, wanted=wanted)
    if len(found) < wanted:
        raise BadInput(
            f"data.{split}_problems = {wanted}: only {len(found)} different questions with "
            f"{data.operations} operations were found; ask for fewer or for more operations"
        )
    return found


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


_NUMBER: Final = re.compile(r"\d+")

_STEP: Final = re.compile(r"(\d+)([+-])(\d+)=(\d+)")
_COUNT: Final = re.compile(r"(?<=([.A-Z]))\d+(?= )")  # so far, behind what was read: a letter, or a dot for nothing

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
    if draw >= 0.5:
        return _shortened(_other_number(problem.worked, rng), rng, counts=_counts(problem.worked))
    return _shortened(_others_reading(problem, problems, rng) or _slipped(problem.worked, rng), rng)


def _shortened(worked: str, rng: Random, counts: Sequence[re.Match[str]] = ()) -> str:
    """Leave out all steps half of the time: what is learnt of short texts carries over to long ones.

    `counts` are where its steps are that are counts, if its answer is not the last of them.
    """
    steps = list(_STEP.finditer(worked)) or _counts(worked) or counts
    if not steps or rng.random() >= 0.5:
        return worked
    answer = worked[steps[-1].end() :]
    return answer if worked.startswith(" ") else answer.lstrip()


def _broken(problem: Problem, rng: Random) -> str:
    """Stop before the answer: at the latest before the last number."""
    text = problem.worked or problem.answer
    numbers = list(_NUMBER.finditer(text))
    end = numbers[-1].start() if numbers else 0
    return text[: rng.randint(1, end)] if end else "I do not know."


def _others_reading(problem: Problem, problems: Sequence[Problem], rng: Random) -> str:
    """Take two times out of three what another picture shows, where counts are read: whoever copies it is wrong."""
    if problem.worked is None or _STEP.search(problem.worked) or rng.random() < 1 / 3:
        return ""
    other = rng.choice(problems)
    return other.worked or "" if other.answer != problem.answer else ""


def _slipped(worked: str, rng: Random) -> str:
    """Get one step wrong and go on from there, so that the answer is wrong too."""
    steps = list(_STEP.finditer(worked))
    if not steps:
        return _miscounted(worked, rng)
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


def _counts(worked: str) -> list[re.Match[str]]:
    """Find the counts of an answer that is the last of them; none where it was worked in another way."""
    found = list(_COUNT.finditer(worked))
    return found if found and worked.rpartition(" ")[2] == found[-1][0] else []


def _miscounted(worked: str, rng: Random) -> str:
    """Count one thing that is not to be counted, or leave one out, and go on from there."""
    found = _counts(worked)
    counts = [int(each[0]) for each in found]
    seen = [at for at, each in enumerate(found) if each[1] != "."]
    if not seen:
        return _other_number(worked, rng)
    read, _, _ = worked.rpartition(" ")
    at = rng.choice(seen)
    slip = 1 if counts[at] == (counts[at - 1] if at else 0) else -1
    shown = iter(count + slip * (index >= at) for index, count in enumerate(counts))
    return f"{_COUNT.sub(lambda _: str(next(shown)), f'{read} ').rstrip()} {counts[-1] + slip}"


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
