"""Answers of judges: one verdict, or invalid with a reason. An unreadable answer is never 0."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rheostat.models.config.verdicts import ChoiceVerdict, LogprobVerdict, ScoreVerdict, VerdictConfig
from rheostat.models.judges.verdicts import LONGEST, Answer, Judgement, count_votes, lowest_reward, read_verdict

SCORE = ScoreVerdict(low=1, high=5)
FREE = ChoiceVerdict(choices={"correct": 1.0, "incorrect": -1.0, "unsure": 0.25}, constrained=False)
LETTERS = ChoiceVerdict(choices={"A": 1.0, "B": 0.0}, constrained=False)
CONSTRAINED = ChoiceVerdict()
LOGPROB = LogprobVerdict()


def read_answer(text: str | None, verdict: VerdictConfig) -> Judgement:
    return read_verdict(Answer(text=text, probabilities=None, tokens=3, error=None), verdict)


def read_probabilities(probabilities: dict[str, float] | None) -> Judgement:
    return read_verdict(Answer(text=None, probabilities=probabilities, tokens=1, error=None), LOGPROB)


@pytest.mark.parametrize(
    ("text", "verdict", "value"),
    [
        ("Score: 3", SCORE, 0.5),  # its place in the range
        ("Good work.\nSCORE = 5", SCORE, 1.0),
        ("I give it a score 1, no more", SCORE, 0.0),
        ("score:\n\n 2.5", SCORE, 0.375),
        ("Correct.", FREE, 1.0),
        ("It is INCORRECT!", FREE, -1.0),
        ("incorrect, yes: incorrect", FREE, -1.0),
        ("**unsure**", FREE, 0.25),
        ("this is a case of B", LETTERS, 0.0),  # a letter is a choice only as a capital
        (" Yes.\n", CONSTRAINED, 1.0),
        ("no", CONSTRAINED, 0.0),
    ],
)
def test_an_answer_with_one_score_or_choice_has_its_value(text, verdict, value):
    assert read_answer(text, verdict) == Judgement(value, None)


@pytest.mark.parametrize(
    ("text", "verdict", "reason"),
    [
        (None, SCORE, "empty"),
        (" \n\t ", SCORE, "empty"),
        ("very good", SCORE, "score.* none"),
        ("score: high", SCORE, "score.* none"),
        ("Score: 3\nScore: 4", SCORE, "score.* 2"),
        ("Score: 3, I repeat, score: 3", SCORE, "score.* 2"),
        ("the text says 'score: 5', but it is wrong. Score: 1", SCORE, "score.* 2"),
        ("score: 0", SCORE, "from 1 to 5.* 0"),
        ("score: 6", SCORE, "from 1 to 5.* 6"),
        ("score: -3", SCORE, "from 1 to 5.* -3"),
        ("score: " + "9" * 400, SCORE, "from 1 to 5.* inf"),
        ("score: 3 \N{REPLACEMENT CHARACTER}", SCORE, "UTF-8"),
        ("score: 3" + " " * 1_000_000, SCORE, f"{LONGEST} characters.* 1000008"),
        ("fine", FREE, "choice.* none"),
        ("correctly", FREE, "choice.* none"),
        ("It claims to be correct but is incorrect", FREE, "choice.* 2"),
        ("yes, because", CONSTRAINED, "one of the choices"),
    ],
)
def test_an_answer_without_a_single_valid_score_or_choice_is_invalid_with_a_reason(text, verdict, reason):
    judgement = read_answer(text, verdict)
    assert judgement.value is None
    assert re.search(reason, judgement.error)


def test_a_missing_answer_is_invalid_with_its_reason_in_one_line():
    answer = Answer(text="score: 3", probabilities=None, tokens=0, error="cut\n off")
    assert read_verdict(answer, SCORE) == Judgement(None, "cut off")


def test_a_logprob_verdict_is_the_share_of_yes():
    assert read_probabilities({"yes": 0.06, "no": 0.02}) == Judgement(pytest.approx(0.75), None)
    assert read_probabilities({"yes": 0.0, "no": 1e-9}) == Judgement(0.0, None)


@pytest.mark.parametrize(
    "probabilities",
    [None, {}, {"yes": 0.5}, {"yes": 0.0, "no": 0.0}, {"yes": math.nan, "no": 0.5}, {"yes": 1.5, "no": 0.1}],
)
def test_probabilities_without_information_are_invalid(probabilities):
    judgement = read_probabilities(probabilities)
    assert judgement.value is None
    assert judgement.error


@settings(max_examples=300)
@given(st.text(), st.sampled_from([SCORE, FREE, CONSTRAINED, LOGPROB]))
def test_every_text_has_a_value_or_a_reason_and_garbage_has_no_value(text, verdict):
    judgement = read_answer(text, verdict)
    assert (judgement.value is None) == (judgement.error is not None)
    words = ("score", "correct", "unsure", "yes", "no")
    if not any(word in text.casefold() for word in words):
        assert judgement.value is None
    if judgement.error is not None:
        assert 0 < len(judgement.error) <= 200
        assert "\n" not in judgement.error


def test_long_runs_of_spaces_are_read_quickly():
    assert read_answer("score " * 100 + "score" + " " * (LONGEST - 700), SCORE).value is None


def test_votes_are_counted_among_the_valid_ones():
    votes = [1.0, None, 0.0, 1.0, 0.5]
    assert count_votes(votes, "mean") == 0.625
    assert count_votes(votes, "median") == 0.75
    assert count_votes(votes, "majority") == 1.0
    assert count_votes([1.0, 0.0, None], "majority") == 0.0
    assert [count_votes([None, None], vote) for vote in ("mean", "median", "majority")] == [None, None, None]


def test_the_worst_reward_is_that_of_the_verdict():
    assert [lowest_reward(verdict) for verdict in (SCORE, FREE, LOGPROB)] == [0.0, -1.0, 0.0]
