"""Word problems with one calculation each, which are almost only solved with the calculator in calculator.py.

    Cleo has 17 boxes of 13 pens. How many?
    <call>17*13</call>            the policy's first turn
    <r>221</r>                    the answer of calculator.py
    #### 221                      the policy's second turn

A guess is almost never right, and an answer after a call almost always, so the policy earns rewards by calling.
"""

from random import Random
from typing import Final

from rheostat.models.config.data import GeneratedData
from rheostat.models.data.generated import sample_problems
from rheostat.models.data.problems import Problem

NAMES: Final = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Max", "Tom", "Zoe")
THINGS: Final = ("books", "coins", "cups", "eggs", "keys", "nuts", "pens", "toys")
QUESTIONS: Final = {
    "+": "{name} has {left} {thing} and gets {right}. How many?\n",
    "-": "{name} has {left} {thing} and gives {right} away. How many?\n",
    "*": "{name} has {left} boxes of {right} {thing}. How many?\n",
}
SMALLEST, LARGEST = 2, 20


class CalculationsData(GeneratedData):
    """Settings of the generated word problems."""

    implementation = "calculations:calculation_problems"
    max_guess = 100


def calculation_problems(data: CalculationsData, split: str, seed: int) -> list[Problem]:
    """Generate the problems of a split ("train" or "heldout"). The same seed gives the same problems."""
    rng = Random(f"{seed}/{split}/calculations")
    return sample_problems(data, lambda source: _sample_problem(rng, source), split)


def _sample_problem(rng: Random, source: str) -> Problem:
    """Sample one problem. Its worked solution consists of a turn that calls the calculator, the reply, and a turn with
    the answer."""
    sign = rng.choice(list(QUESTIONS))
    left, right = (rng.randint(SMALLEST, LARGEST) for _ in range(2))
    if sign == "-":
        left, right = max(left, right), min(left, right)
    question = QUESTIONS[sign].format(name=rng.choice(NAMES), left=left, right=right, thing=rng.choice(THINGS))
    result = {"+": left + right, "-": left - right, "*": left * right}[sign]
    answer = f"#### {result}"
    turns = (f"<call>{left}{sign}{right}</call>", f"\n<r>{result}</r>\n", answer)
    return Problem(source=source, prompt=question, answer=answer, worked="".join(turns), worked_turns=turns)
