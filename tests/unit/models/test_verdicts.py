"""Answers of judges: one verdict, or invalid with a reason; never 0 for what cannot be read."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.config.judges import ChoiceVerdict, LogprobVerdict, ScoreVerdict, VerdictConfig
from models.judges.verdicts import LONGEST, Answer, Judgement, count_votes, read_verdict, worst

SCORE = ScoreVerdict(low=1, high=5)
FREE = ChoiceVerdict(choices={"correct": 1.0, "incorrect": -1.0, "unsure": 0.25}, constrained=False)
CONSTRAINED = ChoiceVerdict()
LOGPROB = LogprobVerdict()


def said(text: str | None, verdict: VerdictConfig) -> Judgement:
    return read_verdict(Answer(text=text, probabilities=None, tokens=3, error=None), verdict)


def likely(probabilities: dict[str, float] | None) -> Judgement:
    return read_verdict(Answer(text=None, probabilities=probabilities, tokens=1, error=None), LOGPROB)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Score: 3", 0.5),
        ("Good work.\nSCORE = 5", 1.0),
        ("I give it a score 1, no more", 0.0),
        ("score:\n\n 2.5", 0.375),
    ],
)
def test_a_score_is_its_place_in_the_range(text, value):
    assert said(text, SCORE) == Judgement(value, None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "expected a verdict, found an empty answer"),
        (" \n\t ", "expected a verdict, found an empty answer"),
        ("very good", "expected one score, found none"),
        ("score: high", "expected one score, found none"),
        ("Score: 3\nScore: 4", "expected one score, found 2"),
        ("Score: 3, I repeat, score: 3", "expected one score, found 2"),
        ("the text says 'score: 5', but it is wrong. Score: 1", "expected one score, found 2"),
        ("score: 0", "expected a score from 1 to 5, found 0"),
        ("score: 6", "expected a score from 1 to 5, found 6"),
        ("score: -3", "expected a score from 1 to 5, found -3"),
        ("score: " + "9" * 400, "expected a score from 1 to 5, found inf"),
        ("score: 3 \N{REPLACEMENT CHARACTER}", "expected text in UTF-8, found bytes that are none"),
        ("score: 3" + " " * 1_000_000, f"expected at most {LONGEST} characters, found 1000008"),
    ],
)
def test_what_is_no_single_score_is_invalid_with_a_reason(text, reason):
    assert said(text, SCORE) == Judgement(None, reason)


def test_an_answer_that_never_came_is_invalid_with_its_own_reason_in_one_line():
    answer = Answer(text="score: 3", probabilities=None, tokens=0, error="cut\n off")
    assert read_verdict(answer, SCORE) == Judgement(None, "cut off")


@pytest.mark.parametrize(
    ("text", "value"),
    [("Correct.", 1.0), ("It is INCORRECT!", -1.0), ("incorrect, yes: incorrect", -1.0), ("**unsure**", 0.25)],
)
def test_a_free_answer_that_names_one_choice_is_that_choice(text, value):
    assert said(text, FREE) == Judgement(value, None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("fine", "expected one choice, found none"),
        ("correctly", "expected one choice, found none"),
        ("It claims to be correct but is incorrect", "expected one choice, found 2"),
    ],
)
def test_a_free_answer_that_names_no_choice_or_several_is_invalid(text, reason):
    assert said(text, FREE) == Judgement(None, reason)


def test_a_letter_is_a_choice_only_as_a_capital():
    letters = ChoiceVerdict(choices={"A": 1.0, "B": 0.0}, constrained=False)
    assert said("this is a case of B", letters) == Judgement(0.0, None)


def test_a_constrained_answer_is_nothing_but_a_choice():
    assert said(" Yes.\n", CONSTRAINED) == Judgement(1.0, None)
    assert said("no", CONSTRAINED) == Judgement(0.0, None)
    expected = "expected nothing but one of the choices, found something else"
    assert said("yes, because", CONSTRAINED) == Judgement(None, expected)


def test_sureness_is_the_share_of_yes():
    assert likely({"yes": 0.06, "no": 0.02}) == Judgement(pytest.approx(0.75), None)
    assert likely({"yes": 0.0, "no": 1e-9}) == Judgement(0.0, None)


@pytest.mark.parametrize(
    "probabilities",
    [None, {}, {"yes": 0.5}, {"yes": 0.0, "no": 0.0}, {"yes": math.nan, "no": 0.5}, {"yes": 1.5, "no": 0.1}],
)
def test_probabilities_that_say_nothing_are_invalid(probabilities):
    judgement = likely(probabilities)
    assert judgement.value is None
    assert judgement.error


@settings(max_examples=300, deadline=None)
@given(st.text(), st.sampled_from([SCORE, FREE, CONSTRAINED, LOGPROB]))
def test_no_text_breaks_the_reading_and_garbage_is_never_a_value(text, verdict):
    judgement = said(text, verdict)
    assert (judgement.value is None) == (judgement.error is not None)
    words = ("score", "correct", "unsure", "yes", "no")
    if not any(word in text.casefold() for word in words):
        assert judgement.value is None
    if judgement.error is not None:
        assert 0 < len(judgement.error) <= 200
        assert "\n" not in judgement.error


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(["score: 5", "score=1", "Score 2.5", "yes", "no", "correct", "10", "<|im_end|>", "\n"]))
)
def test_of_several_different_verdicts_none_counts(parts):
    scores = [part for part in parts if "score" in part.casefold()]
    judgement = said(" | ".join(parts), SCORE)
    assert (judgement.value is not None) == (len(scores) == 1)


def test_reading_long_runs_of_spaces_takes_no_time():
    assert said("score " * 100 + "score" + " " * (LONGEST - 700), SCORE).value is None


def test_votes_are_counted_among_the_valid_ones():
    votes = [1.0, None, 0.0, 1.0, 0.5]
    assert count_votes(votes, "mean") == 0.625
    assert count_votes(votes, "median") == 0.75
    assert count_votes(votes, "majority") == 1.0
    assert count_votes([1.0, 0.0, None], "majority") == 0.0
    assert [count_votes([None, None], vote) for vote in ("mean", "median", "majority")] == [None, None, None]


def test_the_worst_reward_is_that_of_the_verdict():
    assert [worst(verdict) for verdict in (SCORE, FREE, LOGPROB)] == [0.0, -1.0, 0.0]
