"""Models that play the user: their instructions, their context and their training examples."""

import pytest

from rheostat.infra.errors import BadInput
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.config.episodes import DialogueEnvironment
from rheostat.models.config.policy import ScratchPolicy
from rheostat.models.config.training import SupervisedWarmup
from rheostat.models.config.users import DirectoryUser, TrainedUser
from rheostat.models.data.problems import Message, Problem, load_problems
from rheostat.models.environments.user_view import Transcript, fill_instructions, user_examples
from rheostat.models.inspection.users import check_user
from tests.support.demos import demo_part
from tests.support.policies import write_policy

DATA = demo_part("dialogue/measures:MeasuresData")(train_problems=300, heldout_problems=30)
TRAINED = TrainedUser(shape=ScratchPolicy(hidden_size=16, intermediate_size=16, context=64))


def dialogue(model=TRAINED, instructions="width {width}\nheight {height}\n"):
    sampling = SamplingConfig(max_new_tokens=16)
    return DialogueEnvironment(model=model, instructions=instructions, sampling=sampling, prompts="text")


def test_the_worked_turns_of_a_problem_request_the_measure_in_its_question():
    problems = load_problems(DATA, "train", 3)
    asked = set()
    for problem in problems:
        measure = {"How wide?\n": "width", "How high?\n": "height"}[problem.prompt.partition(". ")[2]]
        asked.add(measure)
        value = problem.columns[measure]
        assert problem.worked_turns == (f"{measure}?", f"\n{value}\n", problem.answer)
        assert problem.answer == f"#### {value}"
        assert str(value) not in problem.prompt
        assert problem.columns["width"] != problem.columns["height"]
    assert asked == {"width", "height"}
    assert {p.identity for p in problems}.isdisjoint(p.identity for p in load_problems(DATA, "heldout", 3))


def test_a_user_trains_on_the_replies_of_worked_episodes():
    examples = user_examples(dialogue(), DATA, warmup=SupervisedWarmup(steps=10, batch_size=8), seed=1)
    assert len(examples) == 80
    for prompt, completion, *_ in examples:
        width, height, question = prompt.splitlines()
        instruction = {"width?": width, "height?": height}[question]
        assert completion == f"\n{instruction.split()[1]}\n"


def test_the_context_of_a_simulated_user_has_swapped_roles_as_a_chat_and_no_roles_as_text():
    transcript = Transcript("Be brief.", ("How?", "Why?"), ("So.",))
    expected = [("system", "Be brief."), ("user", "How?"), ("assistant", "So."), ("user", "Why?")]
    assert transcript.messages == tuple(Message(role, text) for role, text in expected)
    assert transcript.text == "Be brief.How?So.Why?"


def test_instructions_contain_values_as_json_texts_unquoted_and_other_braces_unchanged():
    problem = {"size": 7.5, "lid": True, "name": "Ada", "parts": ["a", {"b": None}]}
    assert (
        fill_instructions("{size} {lid} {name} {parts} {} {a b}", problem) == '7.5 true Ada ["a", {"b": null}] {} {a b}'
    )
    with pytest.raises(ValueError, match=r"'sise'.*'size'"):
        fill_instructions("{sise}", problem)


def test_instructions_are_checked_for_every_problem():
    problems = load_problems(DATA, "train", 0)
    assert check_user(dialogue(), problems=problems, gpus=0) > 0
    with pytest.raises(BadInput, match=r"^rollout\.environment\.model: .*problem 0.*'widht'.*'width'"):
        check_user(dialogue(instructions="{widht}"), problems=problems, gpus=0)


def test_a_template_without_system_messages_is_refused_before_the_run(tmp_path):
    write_policy(tmp_path / "user")
    refuses = "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    template = "{% for m in messages %}" + refuses + "{{ m.content }}{% endfor %}"
    (tmp_path / "user" / "chat_template.jinja").write_text(template)
    problem = Problem("train.jsonl:1", "A box.", "", columns={"width": 1, "height": 2})
    with pytest.raises(BadInput, match=r"dialogue for the simulated user.*no system"):
        check_user(dialogue(DirectoryUser(path=tmp_path / "user")), problems=[problem], gpus=0)
