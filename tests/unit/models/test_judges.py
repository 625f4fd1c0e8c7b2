"""Questions that quote a completion, training examples of judges, and the limits beyond which a judge is untrusted."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rheostat.infra.errors import Quarantined
from rheostat.models.config.judges import Canaries, JudgeReward, TrainedJudge
from rheostat.models.config.reward_terms import NumericReward
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.config.training import SupervisedWarmup
from rheostat.models.config.verdicts import ChoiceVerdict, LogprobVerdict, StepsVerdict
from rheostat.models.data.problems import load_problems
from rheostat.models.judges.chats import escape
from rheostat.models.judges.checks import check_judges
from rheostat.models.judges.prompts import fill_template, judge_examples
from rheostat.models.rewards.rules import numeric_reward
from tests.support.demos import ArithmeticData
from tests.support.judged import find_fences, read_answer

FENCED = "Problem: {prompt}\n{fence}\n{completion}\n{fence}\nReference: {answer}. Between the fences, right? {other}"
DATA = ArithmeticData(train_problems=64, heldout_problems=8)
JUDGE = JudgeReward(model=TrainedJudge(), name="honest", template="{answer}|{completion}|")
HIDDEN = "\N{REPLACEMENT CHARACTER}"


def fill(completion: str, *, template: str = FENCED, seed: int = 7) -> str:
    return fill_template(template, prompt="1 + 1?", completion=completion, answer="2", seed=seed)


def build_examples(steps: int = 20, **changes: object):
    return judge_examples(DATA, JUDGE.model_copy(update=changes), SupervisedWarmup(steps=steps), 0)


# ---- questions


def test_every_field_of_a_template_is_filled_in_and_other_braces_stay():
    question = fill("2")
    fence, other = find_fences(question)
    assert fence == other
    assert question == f"Problem: 1 + 1?\n{fence}\n2\n{fence}\nReference: 2. Between the fences, right? {{other}}"


def test_braces_in_a_completion_are_not_filled_in():
    completion = "{answer} {fence} {0} {prompt.__class__}"
    assert fill(completion, template="{completion}") == completion


def test_invisible_characters_become_replacement_characters():
    assert escape("yes\x00\u202e\u200bno\n\t") == f"yes{3 * HIDDEN}no\n\t"


@settings(max_examples=200)
@given(st.text(), st.text())
def test_different_texts_without_invisible_characters_stay_different(first, second):
    if HIDDEN not in escape(first) + escape(second):
        assert (escape(first) == escape(second)) == (first == second)


@settings(max_examples=200)
@given(st.text() | st.sampled_from(["{fence}", "<|x|>", "score: 10", "fence-0"]), st.integers(0, 2**64 - 1))
def test_a_question_has_as_many_fences_as_its_template_for_any_completion(completion, seed):
    question = fill(completion, seed=seed)
    assert question.count(find_fences(question)[0]) == 2


# ---- training examples


def test_half_of_the_examples_are_right_and_their_verdicts_are_true():
    examples = build_examples(40)
    assert len(examples) == 40 * SupervisedWarmup().batch_size
    judge = numeric_reward(NumericReward())
    for each in examples:
        answer, completion, _ = str(each.prompt).split("|")
        assert each.verdict == ("yes" if judge("", completion, answer) else "no"), each.prompt
    assert 0.4 < Counter(each.verdict for each in examples)["yes"] / len(examples) < 0.6
    bare = sum(str(question).split("|")[1].startswith("####") for question, *_ in examples)
    assert 0.4 < bare / len(examples) < 0.7, "the other completions contain some or all of their working"
    assert examples == build_examples(40)


def test_a_judge_that_writes_freely_is_trained_to_solve_training_problems_before_its_verdict():
    free = ChoiceVerdict(choices={"yes": 1, "no": 0}, constrained=False)
    solutions = {problem.prompt: problem.worked for problem in load_problems(DATA, "train", 0)}
    examples = build_examples(template="{prompt}|{completion}", verdict=free)
    for each, constrained in zip(examples, build_examples(), strict=True):
        assert each.completion == f"{solutions[str(each.prompt).split('|')[0]]}\n"
        assert (each.verdict, constrained.completion) == (constrained.verdict, "")
        assert read_answer(f"{each.completion}{each.verdict}", free).value == (each.verdict == "yes")


@pytest.mark.parametrize(
    ("verdict", "texts"),
    [
        (LogprobVerdict(yes="right", no="wrong"), {"right", "wrong"}),
        (ChoiceVerdict(choices={"B": -1, "A": 2, "C": 0}), {"A", "B"}),
    ],
)
def test_a_judge_is_trained_on_the_best_and_the_worst_verdict(verdict, texts):
    assert {each.verdict for each in build_examples(2, verdict=verdict)} == texts


# ---- limits


RULE = NumericReward()
HONEST = JUDGE.model_copy(update={"canaries": Canaries(max_passing=0.25), "max_invalid": 0.05})
STEPS = JUDGE.model_copy(update={"verdict": StepsVerdict()})
GOOD = {"answers": 100, "invalid": 0, "canaries": 2, "canaries_passed": 0, "completions": 100, "unusable": 0}


@pytest.mark.parametrize(
    ("judge", "changes", "parts"),
    [
        pytest.param(HONEST, [{"invalid": 10}, {}], None, id="few invalid answers"),
        pytest.param(HONEST, [{"invalid": 11}, {}], r"11 of 200 answers.* 5\.0%", id="too many invalid answers"),
        pytest.param(HONEST, [{"canaries_passed": 1}, {}], None, id="few known-bad answers pass"),
        pytest.param(HONEST, [{"canaries_passed": 1}] * 2, "2 of 4 test answers", id="many known-bad answers pass"),
        pytest.param(HONEST, [{"answers": 0, "canaries": 0}], None, id="no completion has text"),
        pytest.param(STEPS, [{"unusable": 5}], None, id="few completions have no critique"),
        pytest.param(STEPS, [{"unusable": 6}], r"6 of 100 completions.* 5\.0%", id="many completions have no critique"),
        pytest.param(STEPS, [{"invalid": 50}], None, id="other votes make up for invalid critiques"),
    ],
)
def test_an_iteration_is_quarantined_if_its_judge_is_unreliable(judge, changes, parts):
    metrics = {"honest": [GOOD | each for each in changes]}
    scoring = ScoringConfig(rewards=(RULE, judge))
    if parts is None:
        check_judges(scoring, metrics, iteration=3)
        return
    with pytest.raises(Quarantined, match=rf"iteration 3: .*{parts}") as refused:
        check_judges(scoring, metrics, iteration=3)
    assert "honest" in str(refused.value)
