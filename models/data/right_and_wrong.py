"""Correct and wrong completions of problems, made from worked solutions and reference answers, for training judges and
reward models. Torch-free."""

import re
from collections.abc import Sequence
from random import Random
from typing import Final

from rheostat.models.data.problems import Problem

_NUMBER: Final = re.compile(r"\d+")

_STEP: Final = re.compile(r"(\d+)([+-])(\d+)=(\d+)")
# running count; its prefix is the symbol of the shape that was read, or a dot for an empty cell
_COUNT: Final = re.compile(r"(?<=([.A-Z]))\d+(?= )")

_BROKEN_SHARE: Final = 0.1  # share of the wrong completions that contain no answer: cut short, or without a number


def right_completion(problem: Problem, rng: Random) -> str:
    """Return a correct completion for training a judge. If the problem has a worked solution, half of the completions
    include its steps."""
    return _maybe_drop_steps(problem.worked or problem.answer, rng)


def wrong_completion(problem: Problem, problems: Sequence[Problem], rng: Random) -> str:
    """Return a wrong completion for training a judge or as the worse one of a preference pair: one with a wrong answer,
    or one that stops before the answer. `problems` contains other problems, whose answers may be used."""
    if rng.random() < _BROKEN_SHARE:
        return _cut_before_answer(problem, rng)
    draw = rng.random()
    if problem.worked is None:
        other = rng.choice(problems).answer
        return other if other != problem.answer and draw < 0.5 else _replace_last_number(problem.answer, rng)
    if draw >= 0.5:
        return _maybe_drop_steps(_replace_last_number(problem.worked, rng), rng, counts=_find_counts(problem.worked))
    return _maybe_drop_steps(_use_other_reading(problem, problems, rng) or _change_one_step(problem.worked, rng), rng)


def _maybe_drop_steps(solution: str, rng: Random, counts: Sequence[re.Match[str]] = ()) -> str:
    """Return a worked solution unchanged or, half of the time, only its answer.

    Short texts are included because training on them carries over to long texts. `counts` are the counts that
    `_find_counts` found before the answer of the solution was changed, because they cannot be found afterwards.
    """
    steps = list(_STEP.finditer(solution)) or _find_counts(solution) or counts
    if not steps or rng.random() >= 0.5:
        return solution
    answer = solution[steps[-1].end() :]
    return answer if solution.startswith(" ") else answer.lstrip()


def _cut_before_answer(problem: Problem, rng: Random) -> str:
    """Return the worked solution or the answer, cut at a random place before its last number."""
    text = problem.worked or problem.answer
    numbers = list(_NUMBER.finditer(text))
    end = numbers[-1].start() if numbers else 0
    return text[: rng.randint(1, end)] if end else "I do not know."


def _use_other_reading(problem: Problem, problems: Sequence[Problem], rng: Random) -> str:
    """Return the worked solution of another picture, in two of three cases, if the problem counts the shapes in a
    picture. Return an empty string otherwise.

    This solution is wrong for the problem's own picture, so a model that accepts its result without using the picture
    makes a mistake.
    """
    if problem.worked is None or _STEP.search(problem.worked) or rng.random() < 1 / 3:
        return ""
    other = rng.choice(problems)
    return other.worked or "" if other.answer != problem.answer else ""


def _change_one_step(solution: str, rng: Random) -> str:
    """Return the worked solution with the result of one step changed. All later steps are recomputed from this result,
    so the answer is wrong too."""
    steps = list(_STEP.finditer(solution))
    if not steps:
        return _change_one_count(solution, rng)
    at = rng.randrange(len(steps))
    results = [int(step[4]) for step in steps]
    slips = [slip for slip in range(-5, 6) if slip and min(results[at:]) + slip >= 0 and max(results[at:]) + slip <= 20]
    if not slips:
        return _replace_last_number(solution, rng)
    slip = rng.choice(slips)
    steps_text = [
        f"{int(step[1]) + slip * (index > at)}{step[2]}{step[3]}={results[index] + slip * (index >= at)}"
        for index, step in enumerate(steps)
    ]
    return " ".join((*steps_text, f"#### {results[-1] + slip}"))


def _find_counts(solution: str) -> list[re.Match[str]]:
    """Return the matches of the counts in a worked solution that counts the shapes in a picture. Such a solution lists
    the picture's cells, each with the number of shapes found so far: `.0 O1 S1 #### 1`.

    Returns an empty list if the answer is not the last count, as in other problems and in solutions with a changed
    answer.
    """
    matches = list(_COUNT.finditer(solution))
    return matches if matches and solution.rpartition(" ")[2] == matches[-1][0] else []


def _change_one_count(solution: str, rng: Random) -> str:
    """Return a worked solution for a picture in which one shape is counted too many or too few. All later counts are
    recomputed, so the answer is wrong too."""
    matches = _find_counts(solution)
    counts = [int(each[0]) for each in matches]
    shape_indices = [at for at, each in enumerate(matches) if each[1] != "."]
    if not shape_indices:
        return _replace_last_number(solution, rng)
    counted_cells, _, _ = solution.rpartition(" ")
    at = rng.choice(shape_indices)
    slip = 1 if counts[at] == (counts[at - 1] if at else 0) else -1
    wrong_counts = iter(count + slip * (index >= at) for index, count in enumerate(counts))
    return f"{_COUNT.sub(lambda _: str(next(wrong_counts)), f'{counted_cells} ').rstrip()} {counts[-1] + slip}"


def _replace_last_number(text: str, rng: Random) -> str:
    """Return the text with its last number replaced by another number of similar size. If there is no number, prepend
    "not"."""
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return f"not {text}"
    last = numbers[-1]
    limit = max(20, 2 * int(last[0]))
    other = rng.choice(
        [number for number in _sample_nearby_numbers(int(last[0]), limit, rng) if number != int(last[0])]
    )
    return text[: last.start()] + str(other) + text[last.end() :]


def _sample_nearby_numbers(number: int, limit: int, rng: Random) -> list[int]:
    """Return candidates for replacing `number`: four random numbers from 0 to `limit`, and `number` + 1."""
    return [rng.randint(0, limit) for _ in range(4)] + [number + 1]
