"""Comparisons in math-verify's own tests, made by the `math` reward, and the deliberate differences from them."""

import json
from pathlib import Path
from typing import Final

import pytest

from rheostat.models.config.reward_terms import MathReward
from rheostat.models.rewards.rules import build_reward

SUITE: Final = [
    json.loads(line) for line in (Path(__file__).parent / "answers" / "math_verify.jsonl").read_text().splitlines()
]

DIFFERENCES: Final = {
    ("1,22", "1.22"): (0.0, "a bare comma between numbers of a reference separates two answers"),
    ("$9$", "Answer $ \n 9 \n $"): (1.0, "a formula may be spread over lines"),
    ("$9$", "Answer \\( \n 9 \n \\)"): (1.0, "a formula may be spread over lines"),
    (r"$1 - \frac{1}{\mathrm{e}}$", r"$1 + \frac{1}{\mathrm{e}}$"): (0.0, "an upright e is Euler's number, no unit"),
    (r"$(\frac{3}{5},\frac{8}{3}]$", r"$(0.6,2.6667]$"): (0.0, "6 significant digits, not 2 decimal places"),
    (r"$(\begin{pmatrix}\frac{1}{3}\\ \frac{1}{5} \end{pmatrix})$", r"$\begin{pmatrix}0.33\\0.2 \end{pmatrix}$"): (
        0.0,
        "6 significant digits, not 2 decimal places",
    ),
    (r"$f(x)$", r"$f(y)$"): (0.0, "the names of variables matter"),
    (r"\\boxed{W(n) = 1 \\text{ and } W(n) = -1", "W(x)=1orW(x)=-1"): (0.0, "a box without its end has no value"),
    (r"$x \in [-2,7]$", r"$-2 \\le x \\le 7$"): (0.0, "a set in the reference needs a set in the completion"),
}
"""Scores that differ from math-verify's, by reference and completion, with the reason."""


def judge(completion: str, answer: str) -> float:
    return build_reward(MathReward())("", completion, answer)


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.slow] * row.get("slow", False), id=row["test"]) for row in SUITE]
)
def test_every_comparison_of_math_verify_has_its_score_except_for_deliberate_differences(row):
    different = DIFFERENCES.get((row["gold"], row["pred"]))
    expected = row["expected"] if different is None else different[0]
    assert judge(row["pred"], row["gold"]) == expected


@pytest.mark.parametrize("pair", DIFFERENCES, ids=str)
def test_every_deliberate_difference_is_in_the_suite_with_another_score(pair):
    scores = {row["expected"] for row in SUITE if (row["gold"], row["pred"]) == pair}
    assert scores - {DIFFERENCES[pair][0]}


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("1,22", r"\boxed{22, 1}", r"\boxed{1.22}"),
        (r"1 - \frac{1}{\mathrm{e}}", r"\boxed{1 - e^{-1}}", r"\boxed{1 + e^{-1}}"),
        (r"$(\frac{3}{5},\frac{8}{3}]$", "$(0.6,2.666667]$", "$(0.6,2.6667]$"),
        ("$f(x)$", "$f(x)$", "$f(y)$"),
        (r"$x \in [-2,7]$", r"$x \in [-2, 7]$", r"$-2 \le x \le 7$"),
        ("W(n) = 1", "$W(n) = 1$", "$W(n) = -1$"), ("5t", r"\boxed{t \cdot 5}", r"\boxed{5}"),
        ("R + r", "$r + R$", "$2r$"),
        ("5 -> 6", "5 -> 6", "6"), (r"2\sqrt{3} \text{ cm}", r"\boxed{2\sqrt{3}}", r"\boxed{2\sqrt{3} \text{ m}}"),
        ("10", "$x = 10$", "$2x = 10$"), (r"0.\overline{3}", r"\boxed{1/3}", r"\boxed{0}"), ("1 2 3", "1 2 3", "6"),
        (r"\sin 30^\circ", r"\boxed{\frac{1}{2}}", r"\boxed{\sin 30}"), ("(1 + i)^2", "$2i$", "$2$"),
        ("12:00", r"\boxed{12:00}", r"\boxed{1:00}"), ("3:10", "3:10 PM", r"\boxed{6:20}"),
        ("5", "5", "$5_6$"), ("5", r"\boxed{5}", r"\boxed{\le 5}"), ("5 cm", r"\boxed{5}", r"\boxed{5\text{ m}}"),
        ("28%", r"\boxed{28}", r"\boxed{0.0028}"), ("0.5%", r"\boxed{0.005}", r"\boxed{0.5}"),
        ("2^{-99}", r"\boxed{2^{-99}}", r"\boxed{2^{-98}}"), ("1", r"\boxed{1}", "x^2 + 1"),
    ],
)  # fmt: skip
def test_a_deliberate_difference_holds_in_both_directions(answer, right, wrong):
    assert (judge(right, answer), judge(wrong, answer)) == (1.0, 0.0)
