"""Critiques of steps (CAPO): how an answer is parsed, how votes are counted, and what the judge is shown."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rheostat.models.config.judges import DirectoryJudge, JudgeReward
from rheostat.models.config.reward_terms import PatternSteps
from rheostat.models.config.verdicts import ChoiceVerdict, StepsVerdict
from rheostat.models.judges.checks import check_judge
from rheostat.models.judges.prompts import choose_template
from rheostat.models.judges.verdicts import Critique, Judgement, flag_weights, lowest_reward, read_critique
from rheostat.models.judges.votes import Ballot, JudgedCompletion, step_values
from rheostat.models.text.steps import StepValues
from tests.support.demos import ArithmeticData
from tests.support.judged import build_question, read_answer

VERDICT = StepsVerdict()
JUDGE = JudgeReward(name="steps", model=DirectoryJudge(path="judge"), verdict=VERDICT, votes=4)


# ---- parsing


def read_list(text: str) -> Critique | str:
    """Read a critique of 8 steps that has this text between its tags."""
    return read_critique(f"Step 5 is off.\nVerdict: incorrect\n<incorrect_steps>{text}</incorrect_steps>", num_steps=8)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        *((text, (2, 5)) for text in ("2, 5", "5,2", " 2 ,5, ", "2\n5", "2; 5", "2, 5, 2")),
        *((text, (2, 5)) for text in ("<step_2>, <step_5>", "<step_2>,5", "step_2, step_5")),
        *((text, (2, 4)) for text in ("[2, 4]", " [ 2,4 ] ", "[<step_2>, step_4]", "[step 2, step 4]")),
        *((text, (2, 4)) for text in ("step 2, step 4", "Step 4; Step 2", "step 2\nstep 4\n")),
        *((text, (2,)) for text in ("STEP 2", "step 2, step 2")),
        *((text, (2,)) for text in ("<step_2></step_2>", "<Step_2>\n</Step_2>", "2.", "[2].")),
        *((text, (2, 4)) for text in ("Step_2 and Step_4", "2 and 4", "2, and 4", "step 2 and step 4", "[2 and 4]")),
        *((text, (2, 4)) for text in ("2 , 4 .", "2, 4.", "[2, 4].", "step 2, step 4.", "<step_2></step_2> <step_4>")),
        ("[4]", (4,)),
        *((text, ()) for text in ("", "  \n", "none", "None.", "N/A", "[]", "[ ]")),
        ("1</incorrect_steps> No: <incorrect_steps>3", (3,)),
        ("3</incorrect_steps> Steps 1 and 2 are fine.<br>", (3,)),
        ("<incorrect_steps>4", (4,)),
    ],
)
def test_steps_are_listed_as_numbers_tags_or_words_in_the_last_pair_of_tags(text, steps):
    assert read_list(text) == Critique(steps, 0)


@pytest.mark.parametrize(
    ("text", "critique"),
    [
        ("0, 7, 8, -1, 99999999999999999999999", Critique((0, 7), 3)),
        ("9", Critique((), 1)),
        ("[2, 9]", Critique((2,), 1)),
        ("step 2, step 9", Critique((2,), 1)),
    ],
)
def test_numbers_of_steps_that_do_not_exist_are_dropped_and_counted(text, critique):
    assert read_list(text) == critique


@pytest.mark.parametrize(
    "text",
    [
        "[2, 4", "2, 4]", "[2], [4]", "[[2, 4]]", "[2][4]", "(2, 4)", "{2, 4}", "[2-4]", "[none]", "[2, none]", "[all]",
        "['2', '4']", "[2.4]", "step 2 4", "step 2 step 4", "step 2, 4", "steps 2, 4", "steps 2 and 4", "step 2-4",
        "step", "step two", "step -2", "step 2 of 4", "not step 2", "step 2, none", "no step",
        ".", "2..", "2.4.", "2 and", "and", "<step_2></step_4>", "<step_2>x</step_2>", "1. 2.",
        "step 2: wrong", "step 2.5", "[step 2], [step 4]",
        "the second", "2, maybe 3", "2-4", "2.5", "all", "²", "<b>2</b>",
    ],
)  # fmt: skip
def test_an_ambiguous_list_is_invalid_and_never_means_no_errors(text):
    assert "numbers of steps between the tags" in str(read_list(text))


@pytest.mark.parametrize(
    "text", ["", "Verdict: correct", "<incorrect_steps>2", "2</incorrect_steps>", "incorrect_steps: 2"]
)
def test_a_critique_without_a_pair_of_tags_is_invalid(text):
    assert "<incorrect_steps> tags" in str(read_critique(text, num_steps=8))


def test_an_unclosed_last_tag_leaves_the_pair_before_it():
    assert read_critique("<incorrect_steps>4</incorrect_steps> <incorrect_steps>1", num_steps=8) == Critique((4,), 0)


@pytest.mark.parametrize(
    "text", ["<incorrect_steps>" * 6000, "1," * 40_000, "step 1" + "\n" * 90_000 + "x", "[" * 90_000]
)
def test_a_hostile_answer_is_read_in_linear_time(text):
    read_list(text)


@settings(max_examples=100)
@given(
    st.sets(st.integers(0, 40)), st.text(alphabet="abc <>/_1", max_size=30), st.text(alphabet="abc\n 1,", max_size=30)
)
def test_a_list_is_read_with_any_text_around_it(steps, before, after):
    numbers = ",".join(map(str, steps))
    critique = read_critique(f"{before}<incorrect_steps>{numbers}</incorrect_steps>{after}", num_steps=41)
    assert critique == Critique(tuple(sorted(steps)), 0)


def test_each_step_found_wrong_is_worth_minus_one():
    tag = "<incorrect_steps>1,9</incorrect_steps>"
    assert read_answer(tag, VERDICT, num_steps=4) == Judgement(-0.25, None, (1,), 1)
    total = VERDICT.model_copy(update={"aggregate": "sum"})
    assert read_answer("<incorrect_steps>1,2</incorrect_steps>", total, num_steps=4).value == -2.0
    assert lowest_reward(VERDICT) == -1.0, "an empty completion is as bad as a wrong step"


def test_a_critique_that_cannot_be_read_or_was_cut_short_is_invalid():
    assert read_answer("fine", VERDICT, num_steps=4).steps is None
    cut = read_answer("<incorrect_steps></incorrect_steps>", VERDICT, error="cut short", num_steps=4)
    assert cut == Judgement(None, "cut short")


# ---- votes

CRITIQUES = [[0, 1, 2], [0, 1], [0, 3], [0]]
"""Steps 0 to 3 are flagged by 4, 2, 1 and 1 of four votes."""
FLAGS = ("intersection", "majority", "union", "average")


@pytest.mark.parametrize(
    ("critiques", "changes", "weights"),
    [
        (CRITIQUES, {"flags": "intersection"}, [1, 0, 0, 0, 0]),
        (CRITIQUES, {"flags": "majority"}, [1, 1, 0, 0, 0]),
        (CRITIQUES, {"flags": "majority", "ties": "pass"}, [1, 0, 0, 0, 0]),
        (CRITIQUES, {"flags": "union"}, [1, 1, 1, 1, 0]),
        (CRITIQUES, {"flags": "average"}, [1, 0.5, 0.25, 0.25, 0]),
        ([[]], {"flags": "majority"}, [0, 0]),
        *(([[1]], {"flags": flags}, [0, 1]) for flags in FLAGS),
    ],
)
def test_votes_are_counted_as_configured(critiques, changes, weights):
    assert flag_weights(critiques, VERDICT.model_copy(update=changes), num_steps=len(weights)) == weights


@pytest.mark.parametrize(
    ("critiques", "flags", "values"),
    [
        ([(1,), None, (1, 2), None], "intersection", (0.0, -1.0, 0.0)),
        ([(1,), None, (1, 2)], "average", (0.0, -1.0, -0.5)),
        ([None, None], "intersection", (0.0, 0.0, 0.0)),
    ],
)
def test_a_critique_that_cannot_be_read_is_no_vote(critiques, flags, values):
    verdict = VERDICT.model_copy(update={"flags": flags})
    assert step_values("a\n\nb\n\nc", critiques, verdict) == StepValues((3, 3, 1), values)


# ---- questions


def ask(completion: str, *, answer: str = "4", **changes: object) -> str:
    return build_question(completion, VERDICT.model_copy(update=changes), answer=answer)


def test_a_judge_reads_instructions_then_problem_then_reference_then_numbered_steps():
    question = ask("First.\n\nThen 4.")
    parts = ["Examine every step in turn", "What is 2 + 2?", "Reference solution", "\n4\n"]
    parts += ["<step_0>\nFirst.\n</step_0>\n<step_1>\nThen 4.\n</step_1>", "Verdict: correct", "<incorrect_steps>"]
    places = [question.index(part) for part in parts]
    assert places == sorted(places)


def test_the_reference_is_omitted_if_it_is_off_or_empty():
    assert "Reference" not in ask("4", reference=False)
    assert "Reference" not in ask("4", answer=" ")


def test_only_the_published_prompt_limits_the_search_to_wrong_solutions():
    assert "If it is, no step is incorrect" in ask("4", prompt="published")
    assert "whether or not the solution as a whole comes out right" in ask("4")
    assert "If it is, no step is incorrect" not in ask("4")


def test_a_pattern_decides_where_steps_end():
    question = ask("16+3=19 19-4=15 #### 15", steps=PatternSteps(pattern=r"(?<!#) "))
    assert "<step_2>\n#### 15\n</step_2>" in question


def fill_ballot(reward: JudgeReward, vote: int, *, sample: int = 0, attempt: int = 0):
    judged = JudgedCompletion(prompt_row=3, sample=sample, prompt="p", completion="c", answer="4", origin=3)
    return Ballot(judged, vote).build_question(reward, seed_parts=("steps", 0), attempt=attempt)


def test_every_vote_and_attempt_has_a_different_seed():
    seeds = {fill_ballot(JUDGE, vote, attempt=attempt).seed for vote in range(4) for attempt in range(2)}
    assert len(seeds) == 8


@pytest.mark.parametrize("verdict", [VERDICT, ChoiceVerdict()])
def test_all_votes_on_a_completion_have_one_text_so_that_engines_can_share_the_prefix(verdict):
    reward = JUDGE.model_copy(update={"verdict": verdict})
    texts = [{fill_ballot(reward, vote, sample=sample).text for vote in range(4)} for sample in range(2)]
    assert [len(each) for each in texts] == [1, 1]
    assert texts[0] != texts[1], "another completion has another fence"


def test_a_custom_template_may_show_the_steps():
    reward = JUDGE.model_copy(update={"template": "{fence}{steps}{fence} {prompt}"})
    assert choose_template(reward, answer="4") == reward.template
    check_judge("steps", reward, ArithmeticData(train_problems=64, heldout_problems=8))


def test_a_judge_of_steps_writes_text_and_a_judge_that_chooses_does_not():
    assert JUDGE.generates_text
    assert not JudgeReward(model=DirectoryJudge(path="judge")).generates_text
