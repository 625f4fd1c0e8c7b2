"""Final answers by kind: numbers, words and mathematics in the `math` reward, numbers in the `numeric` reward."""

import json
import re
from itertools import permutations
from pathlib import Path
from string import ascii_lowercase

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from rheostat.models.config.reward_terms import MathReward, NumericReward
from rheostat.models.rewards.rules import build_reward

GSM8K = (Path(__file__).parent / "answers" / "gsm8k.txt").read_text().splitlines()
SCORES = [json.loads(line) for line in (Path(__file__).parent / "answers" / "scores.jsonl").read_text().splitlines()]
BUNDLED = Path(__file__).parents[3] / "configs" / "data" / "gsm8k"
FORMS = (
    "{}",
    r"\boxed{{{}}}",
    "The answer is {}.",
    "So it is.\n#### {}",
    "<think>\\boxed{{1}}</think><answer>{}</answer>",
)


def judge(completion: str, answer: str, *, version: int = 2) -> float:
    return build_reward(MathReward(version=version))("", completion, answer)


def judge_number(completion: str, answer: str, *, version: int = 2) -> float:
    return build_reward(NumericReward(version=version))("", completion, answer)


PAIRS = [json.loads(line) for line in (Path(__file__).parent / "answers" / "pairs.jsonl").read_text().splitlines()]
WRAPPED = (
    *("{}", r"\boxed{{{}}}", r"So the answer is $\boxed{{{}}}$.", "${}$", "$${}$$", r"\( {} \)", r"\[ {} \]"),
    *("<answer>{}</answer>", "<answer>\n{}\n</answer>", r"<answer>\boxed{{{}}}</answer>", "The answer is {}"),
    *("The answer is {}.", "The answer is ${}$.", "**{}**", "**Answer:** {}", "Answer: **{}**", "#### {}"),
    *("Final answer: {}", "<think>maybe 999</think>\n\\boxed{{{}}}", r"**\boxed{{{}}}**"),
    r"Therefore, the final answer is: $\boxed{{{}}}$. I hope it is correct.",
)


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_a_reference_in_a_wrapped_form_is_right_and_another_value_in_this_form_is_wrong(number):
    pair = PAIRS[number]
    forms = [form for form in WRAPPED if not ("$" in form and "$" in pair["answer"])]
    for form in (forms[number % len(forms)], forms[7 * number % len(forms)], forms[1]):
        assert judge(form.format(pair["answer"]), pair["answer"]) == 1, form
        assert judge(form.format(pair["other"]), pair["answer"]) == 0, form


RIGHT = [
    ("42", "<answer>So\n#### 42</answer>"), ("cat", "#### cat<|im_end|>"), ("(1, 2)", "<answer>$(1,2)$</answer></s>"),
    ("x + y = 5", r"\boxed{y + x = 5}"), ("f(x) = 5", r"\boxed{5}"), ("a_{n+1} = 5", r"\boxed{5}"),
    ("cat", r"\boxed{\text{cat}}"), ("cat", "Cat"), ("cat", "The answer is **cat**."), ("No", "no."), ("E",
    r"\boxed{E}"),
    ("New York", r"\boxed{\text{New York}}"), (r"$\text{odd}$", "$odd$"), ("no solution", "No solution"), ("xy",
    r"\boxed{yx}"),
    ("C", "The answer is (C)."), ("C", r"\boxed{\text{(C)}}"), ("C", "(C) 12"), ("C", "**Answer:** C) 12 apples"),
    ("(C)", "C"),
    ("10000", r"\boxed{10\,000}"), (r"10\ 000", r"\boxed{10000}"), ("23 500", r"\boxed{23 500}"), ("1,234,567",
    "1234567"),
    ("1.234.567", "1234567"), ("2**3", r"\boxed{8}"), ("8", "2**3"), ("x^2+1", "x**2 + 1"), ("1e-5",
    r"\boxed{10^{-5}}"),
    ("1e-5", "0.00001"), (r"6.02 \times 10^{23}", r"\boxed{6.02e23}"), ("0xFF", r"\boxed{255}"), ("three",
    r"\boxed{3}"),
    ("5 dollars", r"\boxed{5}"), ("5 dollars", r"\boxed{\$5}"), ("5", "5 dollars"), ("5 kg", r"\boxed{5\text{ kg}}"),
    ("15 cm^2", r"\boxed{15\text{ cm}^2}"), ("3 million", "3000000"), ("3rd", r"\boxed{3}"), ("50 %", r"\boxed{0.5}"),
    ("50%", r"\boxed{50}"), (r"\frac{1}{20}", "5%"), ("90°", r"\boxed{90^\circ}"), ("12:00", r"\boxed{12:00}"),
    ("3:45 PM", "3:45 p.m."), ("3:45 PM", "15:45"), ("May 5, 2020", r"\boxed{\text{5 May 2020}}"), ("May 5, 2020",
    "2020-05-05"),
    ("∞", r"\boxed{\infty}"), ("-inf", r"\boxed{-\infty}"), (r"\frac{1}{0}", r"\boxed{\frac{1}{0}}"), ("nan", "NaN"),
    ("6.626e-34", r"\boxed{6.626\times10^{-34}}"), ("2^{-99}", r"\boxed{2^{-99}}"), ("2/3", r"\boxed{0.666667}"),
    (r"1000\sqrt{2}", "1414.21"), ("6.02214076e23", "6.02214e23"), ("0.1", "0.30000000000000004 - 0.2 = 0.1"),
    ("Costs are $5 + $6 = $11.\n#### 11", r"\boxed{11}"), ("42", "<answer>42</answer>"), ("42", r"\boxed{42.}"),
    ("½", r"\boxed{0.5}"), (r"1\frac{1}{2}", "1½"), ("1 1/2", r"\boxed{1.5}"), (r"\sqrt{2}", "The answer is √2."),
    ("4", "2²"), ("6", "2 × 3"), ("-5", "The answer is −5"), ("2pi", r"\boxed{2\pi}"), ("sqrt(2)", r"\boxed{\sqrt2}"),
    ("x = 5", r"\boxed{5}"), (r"\{1, 2\}", r"\boxed{2, 1}"), ("3,5", r"\boxed{5, 3}"), ("3.5", "The answer is 3,5"),
    ("x ≤ 5", r"\boxed{x \le 5}"), ("1101_2", r"\boxed{1101_2}"), ("5 dollars", "It is 5 dollars.\n#### 5 dollars"),
]  # fmt: skip

WRONG = [
    ("x + y = 5", r"\boxed{5}"), ("0", r"\boxed{\begin{cases} x & x>0 \\ -x & x \le 0 \end{cases}}"),
    ("cat", r"\boxed{act}"), ("no", r"\boxed{on}"), ("listen", r"\boxed{silent}"), ("nan", r"\boxed{a n^2}"),
    ("E", r"\boxed{e}"), ("e", r"\boxed{E}"), ("left", r"\boxed{felt}"), ("max", r"\boxed{xam}"), ("B", r"\boxed{C}"),
    ("A", r"\boxed{\text{(A) or (B)}}"), ("cat", "cat or dog"), ("3 red, 2 blue", "2 red, 3 blue"),
    ("7 out of 10", r"\boxed{10 out of 7}"), ("10000", r"\boxed{10\,001}"), ("10000", "The answer is 10 001."),
    ("5 dollars", r"\boxed{5 cents}"), ("5 cm", r"\boxed{5\text{ m}}"), ("3 million", "3"), ("5 €", r"\boxed{\$5}"),
    ("12:00", r"\boxed{1:00}"), ("3:45 PM", "3:45 AM"), ("12:30", r"\boxed{5}"), ("2020-05-05", r"\boxed{2010}"),
    (r"\infty", r"\boxed{-\infty}"), ("1/0", r"\boxed{5}"), ("1e999", r"\boxed{5}"), ("1e-5", r"\boxed{1e-6}"),
    ("6.626e-34", r"\boxed{6.627\times10^{-34}}"), ("10^{-20}", r"\boxed{10^{-21}}"), ("2^{-99}", r"\boxed{2^{-98}}"),
    (r"\frac{1}{2004!}", r"\boxed{\frac{1}{2006!}}"), ("(10^{-7}, 2)", "$(0.0000002, 2)$"), ("1000000", "1000001"),
    ("10455.25", "10455.26"), ("299792.458", "299792"), ("0", "1e-9"), (r"1000\sqrt{2}", "1414.22"), ("2/3", "0.67"),
    ("1", "x^2 + 1"), ("1 1/2", r"\boxed{\frac{11}{2}}"), ("50%", r"\boxed{500}"), ("0.5", r"\boxed{0.5\%}"),
    ("100%", "100 dollars"), ("5", "≤ 5"), (r"\le 5", r"\ge 5"), ("5", "$5_6$"), ("5", "5!"), ("3,5", r"\boxed{3.5}"),
    ("3.5", r"\boxed{35}"), ("1.234", r"\boxed{1,234}"), (r"\sqrt{25}", "5 thousand"), (r"1 - \frac{1}{\mathrm{e}}",
    r"$1 + \frac{1}{\mathrm{e}}$"),
    ("42", r"<think>\boxed{42}</think><answer>43</answer>"), ("5 N·m", "5 kg"), ("3.5 m", "3.5 km"), ("x \\le 5", "5"),
]  # fmt: skip


@pytest.mark.parametrize("row", SCORES, ids=lambda row: ascii(row["answer"])[1:-1])
def test_each_completion_of_a_reference_has_the_score_that_it_deserves(row):
    scores = {completion: judge(completion, row["answer"]) for completion in (*row["right"], *row["wrong"])}
    assert scores == dict.fromkeys(row["right"], 1.0) | dict.fromkeys(row["wrong"], 0.0)


@pytest.mark.parametrize(("answer", "completion"), RIGHT)
def test_an_answer_in_another_spelling_is_right(answer, completion):
    assert judge(completion, answer) == 1.0


@pytest.mark.parametrize(("answer", "completion"), WRONG)
def test_an_answer_with_another_meaning_is_wrong(answer, completion):
    assert judge(completion, answer) == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        *dict.fromkeys(answer for answer, _ in (*RIGHT, *WRONG) if "\n" not in answer and "$" not in answer),
        "x", "pi", "theta", "3:04", "24:00", "5/6/2020", "June 2020", "H2O", "CO_2", "C. Paris", "No, it is not",
        "Jean-Luc",
        "北京", "Москва", "AB", "iv", "DNE", "0/0", r"\log 0", "1e99999999", "9^{9^{9}}", "3 ± √2", "π/2", "f(x) = x^2",
        "x = 2, y = 3", "[0, 1)", r"(-\infty, 3] \cup [5, \infty)", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "∅", "ℝ",
        "all real numbers", r"\{x \mid x > 0\}", "3.14...", r"0.\overline{3}", "1h30m", "5 ft 11 in", "twenty-one",
        "10k",
        "A+", r"\frac{dy}{dx} = 2x", r"10 \pmod{7}", "€5,50", "1.234,56 €", "3 apples and 2 pears", "50¢", "98.6°F",
        "60 km/h",
        "T", "p and q", "noon", "12 noon", "1990s", "7 3/4", "-7 3/4", "007", "x' = 3", "a dog", r"\text{no solution}",
    ],
)  # fmt: skip
def test_the_text_of_a_reference_is_right_in_every_form(answer):
    assert {form: judge(form.format(answer), answer) for form in FORMS} == dict.fromkeys(FORMS, 1.0)


@pytest.mark.parametrize("answer", GSM8K[::50])
def test_an_answer_of_gsm8k_is_right_in_every_form(answer):
    completions = [
        *(form.format(answer) for form in FORMS),
        f"#### **{answer}**",
        f"#### ${answer}",
        f"#### {answer} dollars",
    ]
    assert {completion: judge(completion, answer) for completion in completions} == dict.fromkeys(completions, 1.0)


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("score", [judge, judge_number])
def test_references_of_gsm8k_equal_themselves_and_no_other_number(score):
    for answer, other in zip(GSM8K, [*GSM8K[1:], GSM8K[0]], strict=True):
        is_same = answer.replace(",", "") == other.replace(",", "")
        assert (score(f"#### {answer}", answer), score(f"#### {other}", answer)) == (1.0, float(is_same))


@pytest.mark.parametrize("score", [judge, judge_number])
def test_worked_solutions_of_gsm8k_are_right(score):
    rows = [json.loads(line) for path in sorted(BUNDLED.glob("*.jsonl")) for line in path.read_text().splitlines()]
    finals = ["####" + row["answer"].rpartition("####")[2] for row in rows]
    assert len(rows) == 256
    assert all(score(final, row["answer"]) == 1.0 for final, row in zip(finals, rows, strict=True))
    assert not any(
        score(final, row["answer"])
        for final, row in zip([*finals[1:], finals[0]], rows, strict=True)
        if final != "####" + row["answer"].rpartition("####")[2]
    )


@pytest.mark.parametrize(
    ("answer", "completion", "expected"),
    [
        ("3,5", "#### 3.5", 1), ("3,5", "#### 35", 0), ("35", "#### 3,5", 0), ("3.5", "#### 3,5", 1), ("1,234",
        "#### 1234", 1),
        ("1.234,5", "#### 1234.5", 1), ("1.234", "#### 1,234", 0), ("-5", "#### −5", 1), ("5", "#### −5", 0),
        ("42", "#### **42**", 1), ("42", "**#### 42**", 1),
        ("42", "<answer>So\n#### 42</answer>", 1), ("42", "#### 42<|im_end|>", 1), ("42", r"#### \boxed{42}", 1),
        ("42", "#### $42$", 1),
        ("18", "#### $18", 1), ("#### $18", "#### 18", 1), ("-18", "#### -$18", 1), ("18", "#### $18.50", 0),
        ("50%", "#### 50%", 1), ("50%", "#### 0.5", 1), ("50", "#### 50%", 1), ("0.5", "#### 50%", 1), ("50%",
        "#### 5", 0),
        ("1/2", "#### 0.5", 1), ("1/2", "#### 1/2", 1), ("1", "#### 1/2", 0), ("2", "#### 1/2", 0), ("½",
        "#### 0.5", 1),
        ("1 1/2", "#### 1.5", 1), (r"\frac{1}{2}", "#### 0.5", 1), ("1/3", "#### 0.333333", 0), ("10000",
        "#### 10 000", 1),
        ("1e16", "#### 10000000000000000", 1), ("0.00001", "#### 1e-5", 1), ("72", "#### 72 dollars.", 1),
        ("8", "#### 5 + 3 = 8", 1), ("5", "#### 5 + 3", 0), ("2", "#### 2^3", 0), ("3.5", "#### 3.5 or 4", 0),
        ("-5", "#### (-5)", 1), ("18", "#### eighteen", 1), ("3.5", "####\n3.5", 1), ("18", r"#### $\$18$", 1),
        ("18", "#### 18 000", 0), ("1000000", "#### 10⁶", 1), ("1000000", "#### \uff11000000", 1),
        ("72", "#### 72, 73", 0), ("72",
        "#### 73 #### 72", 1),
    ],
)  # fmt: skip
def test_the_number_after_the_marker_may_have_any_notation(answer, completion, expected):
    assert judge_number(completion, answer) == expected


def test_a_pattern_of_the_user_decides_where_the_number_is():
    reward = build_reward(NumericReward(pattern=r"total: (\S+)"))
    assert [reward("", f"total: {text} #### 1", "1/2") for text in ("0.5", "1/2", "50%", "1")] == [1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("answer", ["", "many", "1/0", "#### none", "5 + 3"])
def test_a_reference_without_one_number_is_refused(answer):
    with pytest.raises(ValueError, match=f"contains no number.*{re.escape(repr(answer))}"):
        judge_number("#### 1", answer)


def test_runs_of_version_1_keep_their_scores():
    assert [judge(completion, "cat", version=1) for completion in (r"\boxed{act}", r"\boxed{tac}")] == [1.0, 1.0]
    assert judge(r"\boxed{2^{-98}}", "2^{-99}", version=1) == 1.0
    assert [judge_number("#### 35", "3,5", version=1), judge_number("#### **42**", "42", version=1)] == [1.0, 0.0]


# ---- properties
@settings(deadline=None)
@given(st.integers(-(10**12), 10**12), st.integers(0, 3))
def test_a_number_is_right_in_every_notation(value, decimals):
    plain = f"{value / 10**decimals:.{decimals}f}" if decimals else str(value)
    grouped = f"{value / 10**decimals:,.{decimals}f}" if decimals else f"{value:,}"
    assume(float(plain) == value / 10**decimals)
    spellings = [
        plain,
        grouped,
        grouped.replace(",", r"\,"),
        grouped.replace(",", "{,}"),
        plain.replace("-", "−"),
        f"{plain} apples",
    ]
    assert {text: judge(rf"\boxed{{{text}}}", plain) for text in spellings} == dict.fromkeys(spellings, 1.0)
    assert judge(plain, rf"\boxed{{{grouped}}}") == 1.0


@settings(deadline=None)
@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9), st.integers(0, 2))
@example(1_000_000, 1_000_001, 0)
def test_two_different_numbers_are_never_equal(one, other, decimals):
    assume(one != other)
    assert judge(rf"\boxed{{{other / 10**decimals:.{decimals}f}}}", f"{one / 10**decimals:.{decimals}f}") == 0.0


@pytest.mark.parametrize("form", ["{}{}", "1 - 7{}{}", r"\frac{{1}}{{{}}}{}"])
def test_a_formula_never_equals_the_formula_without_its_variable_or_with_the_other_case(form):
    for letter in ascii_lowercase:
        answer, bare, other = form.format(2, letter), form.format(2, ""), form.format(2, letter.upper())
        scores = [judge(rf"\boxed{{{each}}}", answer) for each in (answer, bare, other)]
        assert (letter, scores) == (letter, [1.0, 0.0, 0.0])


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(["tea", "team", "stone", "no", "own", "nan", "Evelyn", "arc", "beta", "min", "left", "text"]),
    st.data(),
)
def test_a_word_never_equals_its_letters_in_another_order(word, data):
    other = "".join(data.draw(st.sampled_from(sorted({*permutations(word)}))))
    expected = float(other.casefold() == word.casefold())
    assert [judge(rf"\boxed{{{other}}}", word), judge(rf"\boxed{{\text{{{other}}}}}", word)] == [expected, expected]


@settings(deadline=None, max_examples=60)
@given(st.text("0123456789.,:/%$-+*^() abceixyNO√½²×−°\\{}_=<>#", min_size=1, max_size=10))
@example("1e9999")
@example("####")
@example("-.")
def test_any_reference_is_refused_or_equal_to_itself_and_never_fails(answer):
    try:
        score = judge(answer, answer)
    except ValueError as error:
        assert "no number or formula" in str(error)
    else:
        assert score == 1.0
        assert judge(rf"\boxed{{{answer.replace('{', '').replace('}', '')}}}", "17") in (0.0, 1.0)


@pytest.mark.parametrize(
    "text",
    [
        "1,000 " * 10**6,
        "1 " * 10**6,
        "word " * 10**6 + "\n#### 18",
        "\\frac{1}{" * 10**6,
        r"\boxed{" * 5000,
        "#### " * 5000,
        "answer is " + " " * 50_000 + "x",
        "$" * 5001,
        "**" * 5000,
        "<answer>" * 5000,
    ],
)
def test_long_malformed_completions_are_wrong_at_once(text):
    assert (judge(text, "17"), judge(text, "cat"), judge_number(text, "17")) == (0.0, 0.0, 0.0)
