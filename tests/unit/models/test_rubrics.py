"""Rubrics: criteria with weights in the rows of a file, and the scores of a judge that rates them one by one."""

import json
from pathlib import Path

import pytest

from rheostat.infra.errors import BadInput
from rheostat.models.config.data import FileData
from rheostat.models.config.judges import DirectoryJudge, JudgeReward
from rheostat.models.config.verdicts import ChoiceVerdict, LogprobVerdict, RubricVerdict, ScoreVerdict
from rheostat.models.data.files import read_problems
from rheostat.models.data.rubrics import Criterion, parse_rubric
from rheostat.models.judges.checks import check_judge
from rheostat.models.judges.rubrics import combine_answers, combine_judgements
from rheostat.models.judges.verdicts import Answer, Judgement
from rheostat.models.judges.votes import Ballot, JudgedCompletion

RUBRIC = (Criterion("Names the capital", 5), Criterion("Is polite", 3), Criterion("Makes up a source", -4))
JUDGE = JudgeReward(model=DirectoryJudge(path=Path("judge")), verdict=RubricVerdict())


@pytest.mark.parametrize(
    ("rows", "weights"),
    [
        ([{"criterion": "a", "points": 7, "tags": ["axis:accuracy"]}], [7]),
        ([{"title": "A", "description": "a", "weight": -1}, {"title": "a", "weight": 2.5}], [-1, 2.5]),
        ('[{"criterion": "a"}]', [1]),
        ({"rubrics": [{"text": "a", "weight": 2}]}, [2]),
    ],
)
def test_the_forms_of_published_rubrics_are_read(rows, weights):
    assert [(criterion.text, criterion.weight) for criterion in parse_rubric(rows)] == [("a", each) for each in weights]


@pytest.mark.parametrize(
    ("values", "reward"),
    [((1, 1, 0), 1), ((1, 0, 0), 5 / 8), ((1, 0, 1), 1 / 8), ((0, 1, 1), 0), ((0, 0, 0), 0), ((0.5, 1, 0), 5.5 / 8)],
)
def test_values_are_weighted_by_points_and_clipped_at_0(values, reward):
    judgements = [Judgement(value, None) for value in values]
    assert combine_judgements(RUBRIC, judgements) == Judgement(pytest.approx(reward), None)


def test_a_criterion_without_a_verdict_leaves_the_completion_without_a_score():
    judgements = [Judgement(1, None), Judgement(None, "expected one choice, found none"), Judgement(0, None)]
    assert combine_judgements(RUBRIC, judgements) == Judgement(None, "criterion 1: expected one choice, found none")


def test_the_stored_text_lists_every_criterion_with_its_answer():
    answers = [Answer("yes", None, 2, None), Answer(None, {"yes": 0.5, "no": 0.5}, 1, None), Answer("?", None, 4, None)]
    judgements = [Judgement(1.0, None), Judgement(0.5, None), Judgement(None, "found none")]
    combined = combine_answers(RUBRIC, answers, judgements)
    assert json.loads(combined.text) == [
        {"criterion": "Names the capital", "weight": 5, "value": 1.0, "answer": "yes"},
        {"criterion": "Is polite", "weight": 3, "value": 0.5},
        {"criterion": "Makes up a source", "weight": -4, "value": None, "answer": "?", "error": "found none"},
    ]
    assert combined.tokens == 7


@pytest.mark.parametrize(
    ("verdict", "form"),
    [
        (ChoiceVerdict(), "Answer yes or no."),
        (LogprobVerdict(yes="met", no="not met"), "Answer met or not met."),
        (ScoreVerdict(low=1, high=5), "Answer with `Score: ` and a number from 1 (not at all) to 5 (fully)."),
    ],
)
def test_the_judge_gets_one_question_for_each_criterion(verdict, form):
    reward = JUDGE.model_copy(update={"verdict": RubricVerdict(criterion=verdict)})
    judged = JudgedCompletion(0, 0, "Which city?", "Paris <b>", "", 0, rubric=RUBRIC)
    questions = Ballot(judged, 0).build_questions(reward, seed_parts=("judge", 1), attempt=0)
    assert len({question.seed for question in questions}) == 3
    for question, criterion in zip(questions, RUBRIC, strict=True):
        assert f"Criterion:\n{criterion.text}\n" in question.text
        assert "Paris &lt;b&gt;" in question.text
        assert question.text.endswith(f"{form}\n")


def test_only_templates_for_rubrics_have_the_field_criterion():
    judged = JudgedCompletion(0, 0, "a", "b", "", 0)
    plain = JudgeReward(model=DirectoryJudge(path=Path("judge")), template="{completion} {criterion}")
    [question] = Ballot(judged, 0).build_questions(plain, seed_parts=(1,), attempt=0)
    assert question.text == "b {criterion}"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "expected a list of criteria"),
        ([], "expected a list of criteria"),
        (["a"], r"rubric: \[0\]: expected an object"),
        ([{"weight": 1}], r"\[0\]: expected the text of the criterion"),
        ([{"criterion": "a", "weight": "1"}], r"\[0\]: expected a number as weight, found '1'"),
        ([{"criterion": "a", "weight": -1}], "at least one criterion must have a positive weight"),
        ([{"criterion": "a"}] * 101, "at most 100 criteria"),
    ],
)
def test_a_row_with_an_invalid_rubric_is_named(value, message, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": "p", "rubric": value}))
    with pytest.raises(BadInput, match=f"data.jsonl:1: rubric: .*{message.removeprefix('rubric: ')}"):
        read_problems(path, FileData(path=path, answer_column=None, rubric_column="rubric"))


def test_problems_carry_their_rubrics(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": "p", "r": [{"criterion": "a", "points": 2}]}))
    [problem] = read_problems(path, FileData(path=path, answer_column=None, rubric_column="r"))
    assert problem.columns == {"rubric": [{"criterion": "a", "weight": 2.0}]}


def test_a_judge_of_rubrics_needs_a_column_with_rubrics_and_the_criterion_in_its_template():
    with_rubrics = FileData(path=Path("x.jsonl"), rubric_column="r")
    check_judge("judge", JUDGE, with_rubrics)
    with pytest.raises(BadInput, match=r"reward judge: verdict.kind = 'rubric' needs .* data.rubric_column"):
        check_judge("judge", JUDGE, FileData(path=Path("x.jsonl")))
    with pytest.raises(BadInput, match=r"does not contain {criterion}"):
        check_judge("judge", JUDGE.model_copy(update={"template": "{completion}"}), with_rubrics)
