"""Reward for the steps of a worked answer to an arithmetic problem. A program checks them instead of a judge.

Ana has 16 pens, buys 3, sells 4. How many?
16+3=19 19-4=14 #### 14        the second step is miscalculated; the answer follows from it
"""

import re
from typing import Final

GAINS: Final = ("buys", "finds")
LOSSES: Final = ("sells", "loses")
"""Verbs of the changes in a problem (`configs/arithmetic.py`)."""
WRONG: Final = -1.0
"""Reward of a wrong step. A correct step has the reward 0."""

_START: Final = re.compile(r"\bhas (\d+)")
_CHANGE: Final = re.compile(rf"\b({'|'.join((*GAINS, *LOSSES))}) (\d+)")
_STEP: Final = re.compile(r"(\d{1,9})([+-])(\d{1,9})=(-?\d{1,9})")
_ANSWER: Final = re.compile(r"####\s*(-?\d{1,9})")


def wrong_steps(prompt: str, completion: str, answer: str, *, steps: list[str]) -> list[float]:
    """Return, for each step of a solution, -1 if it is miscalculated or does not follow from the problem and the step
    before it, else 0.

    Each step is checked against the result that the step before it states, so a single mistake is flagged only once.
    There must be one step for each change in the problem, and the final answer must equal the result of the last step.
    Text that is neither a step nor an answer is wrong.
    """
    start, changes = _read(prompt)
    result, done = start, 0
    values: list[float] = []
    for step in steps:
        calculation, answered = _STEP.fullmatch(step.strip()), _ANSWER.fullmatch(step.strip())
        if calculation is not None:
            expected = f"{result}{changes[done]}" if done < len(changes) else None
            operation, claimed_result = f"{calculation[1]}{calculation[2]}{calculation[3]}", int(calculation[4])
            values.append(0.0 if operation == expected and claimed_result == _sum(calculation) else WRONG)
            result, done = claimed_result, done + 1
        else:
            follows = answered is not None and int(answered[1]) == result and done == len(changes)
            values.append(0.0 if follows else WRONG)
    return values


def _read(prompt: str) -> tuple[int, list[str]]:
    """Return the initial number in an arithmetic problem, and the changes to it, such as `+3` and `-4`.

    Raises ValueError if the prompt is not an arithmetic problem.
    """
    start = _START.search(prompt)
    if start is None:
        raise ValueError(
            "the reward 'arithmetic_steps' can only score generated problems of arithmetic.py, but the "
            f"prompt is {prompt[:60]!r}"
        )
    return int(start[1]), [f"{'+' if verb in GAINS else '-'}{number}" for verb, number in _CHANGE.findall(prompt)]


def _sum(step: re.Match[str]) -> int:
    """Return the correct result of the calculation in a step, computed from its two operands."""
    return int(step[1]) + (int(step[3]) if step[2] == "+" else -int(step[3]))
