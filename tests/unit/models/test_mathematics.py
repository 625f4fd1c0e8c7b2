"""The reward of mathematics: references as people write them, and completions that no machine can evaluate."""

from contextlib import closing

import pytest

from rheostat.models.config.reward_terms import MathReward
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.rewards.evaluate import Case, Evaluator, Verdict
from rheostat.models.rewards.rules import build_reward


def judge(completion: str, answer: str) -> float:
    return build_reward(MathReward())("prompt", completion, answer)


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (r"\$18.90", r"\boxed{18.9}", r"\boxed{18}"), (r"\$18.90", r"\boxed{\$18.90}", r"\boxed{\$1890}"),
        ("$18.90", "It costs $18.90", "It costs $18.91"), (r"$\$18.90$", r"$18.9$", r"$18$"),
        (r"\boxed{\$18.90}", r"\boxed{18.90}", r"\boxed{8.90}"), (r"-\$5", r"\boxed{-5}", r"\boxed{5}"),
        (r"\$-5", r"\boxed{-5}", r"\boxed{5}"), (r"5\$", r"\boxed{5}", r"\boxed{50}"),
        (r"x = \$5", r"\boxed{5}", r"\boxed{4}"), (r"\$1,000", r"\boxed{1000}", r"\boxed{1}"),
        (r"\$1{,}000.50", r"\boxed{1000.5}", r"\boxed{1000}"), ("1,000", r"\boxed{1{,}000}", r"\boxed{0}"),
        ("1 000", r"\boxed{1000}", r"\boxed{0}"), (r"1\,234\,567.5", r"\boxed{1234567.5}", r"\boxed{1234567}"),
        ("1,234,567", r"\boxed{1234567}", r"\boxed{1234}"), ("€5", r"\boxed{5}", r"\boxed{6}"),
        ("€5", r"\boxed{€5}", r"\boxed{€6}"), ("£3.20", r"\boxed{3.2}", r"\boxed{3}"),
        ("  5\n", r"\boxed{5}", r"\boxed{6}"), ("50%", r"\boxed{50\%}", r"\boxed{5\%}"),
        (r"\frac{1}{2}", r"so it is \boxed{0.5}", r"$\frac{2}{3}$"), ("1 + x", "$x + 1$", "I do not know"),
        ("2", "$2$", r"$\frac{1}{$"),
    ],
)  # fmt: skip
def test_references_are_read_with_currencies_and_thousands_separators(answer, right, wrong):
    assert (judge(right, answer), judge(wrong, answer)) == (1.0, 0.0)


@pytest.mark.parametrize("answer", ["", "   ", "$$", r"\$", "He pays.\nThat is all."])
def test_a_reference_without_mathematics_is_refused_by_name(answer):
    with pytest.raises(ValueError, match="no number or formula"):
        judge(r"\boxed{5}", answer)
    assert MathReward.checks_references


SANE = [
    (r"\boxed{2^{10}}", "1024"), (r"\boxed{10!}", "3628800"), (r"\boxed{\frac{3}{4}}", "0.75"),
    (r"\boxed{1{,}000}", "1000"), (r"\boxed{2^{100} + 1}", "1267650600228229401496703205377"),
    (r"\boxed{100!/98!}", "9900"), (r"\boxed{\binom{10}{3}}", "120"),
    (r"\boxed{\binom{1000000}{2}}", "499999500000"), (r"\boxed{\sqrt{50}}", r"5\sqrt{2}"),
    (r"\boxed{(-1)^{100000001}}", "-1"), (r"\boxed{(x+1)^2}", "x^2+2x+1"),
    (r"\boxed{x^{2024}}", r"x \cdot x^{2023}"), (r"\boxed{\sum_{k=1}^{100} k}", "5050"),
    (r"\boxed{\prod_{k=1}^{5} k}", "120"), (r"\boxed{\sum_{k=0}^{\infty} 2^{-k}}", "2"),
    (r"\boxed{e^{2}}", r"e \cdot e"), (r"\boxed{3^{3^{3}}}", "7625597484987"), (r"\boxed{\gcd(12, 18)}", "6"),
    (r"\boxed{\{1, 2^{3}\}}", r"\{8, 1\}"),
    (r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"\boxed{9^{9^{9}}}", "9^{9^{9}}"), (r"\boxed{9^{9^9}}", "9^{9^{9}}"),
    (r"\boxed{(x+1)^{2024}}", "(x+1)^{2024}"), (r"\boxed{x = 2^{10^{10}}}", "x = 2^{10^{10}}"),
]  # fmt: skip


@pytest.mark.parametrize(("completion", "answer"), SANE)
def test_completions_that_evaluate_to_the_reference_or_are_spelled_like_it_are_right(completion, answer):
    assert judge(completion, answer) == 1.0


HOSTILE = [
    r"\boxed{9^{9^{9}}}", r"\boxed{9^{9^{9^{9}}}}", "$9^{9^{9}}$", "The answer is 9^9^9^9", "9**9**9",
    r"\boxed{((9^9)^9)^{9^9}}", r"\boxed{10^{10^{10}} + 1}", r"\boxed{9^{-9^{9}}}", r"\boxed{\frac{1}{9^{9^{9}}}}",
    r"\boxed{\sqrt{9^{9^{9}}}}", r"\boxed{\sqrt{10^{9999}+7}}", r"\boxed{x^{9^{9^{9}}}}", r"\boxed{x = 9^{9^{9}}}",
    r"\boxed{|9^{9^{9}}|}", r"\boxed{\lfloor 9^{9^{9}} \rfloor}", r"\boxed{\log(9^{9^{9}})}",
    r"\boxed{\sin(10^{10^{10}})}", r"\boxed{e^{e^{e^{e^{e}}}}}", r"\boxed{(10^{10})!}", r"\boxed{100000000!}",
    r"\boxed{((10!)!)!}", r"\boxed{\Gamma(10^{9})}", r"\boxed{\binom{10^{9}}{10^{8}}}",
    r"\boxed{\binom{1000000000}{100000000}}", r"\boxed{\prod_{i=1}^{10^{9}} i}",
    r"\boxed{\sum_{i=1}^{10^{9}} \frac{1}{i}}", r"\boxed{\int_0^1 x^{9^{9}} dx}", r"\boxed{(x+1)^{10000}}",
    r"\boxed{(x+y+z)^{500}}", r"\boxed{(1+\sqrt{2})^{10000}}", r"\boxed{\begin{pmatrix}9^{9^9}&0\\0&1\end{pmatrix}}",
    r"\boxed{\{1, 2, 9^{9^{9}}\}}", r"\boxed{9^{9^{9}}, 1}", r"\boxed{\gcd(10^{100000000}, 3)}",
    r"\boxed{" + "9" * 5000 + "}", "9" * 5000, r"\boxed{" + "{" * 3000 + "1" + "}" * 3000 + "}",
    r"\boxed{" + "(" * 3000 + "1" + ")" * 3000 + "}", r"\boxed{" + "2^{" * 300 + "2" + "}" * 300 + "}",
]  # fmt: skip


@pytest.fixture(scope="module")
def evaluator():
    """Evaluator that judges outside the main thread, where no alarm can interrupt it."""
    with closing(Evaluator(ScoringConfig(rewards=(MathReward(),)))) as evaluator:
        yield evaluator


@pytest.mark.parametrize("answer", ["3", r"\frac{3}{4}", "x + 1", r"\{1, 2\}", "9^{9^{8}}"])
def test_completions_that_nobody_can_evaluate_are_wrong_and_not_missing(evaluator, answer):
    verdicts = evaluator.evaluate([Case("prompt", completion, answer) for completion in (*HOSTILE, f"${answer}$")])
    expected = [Verdict((0.0,), None)] * len(HOSTILE) + [Verdict((1.0,), None)]
    assert dict(zip([*HOSTILE, "right"], verdicts, strict=True)) == dict(
        zip([*HOSTILE, "right"], expected, strict=True)
    )
