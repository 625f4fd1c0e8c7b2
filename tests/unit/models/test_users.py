"""Models that play the user: what they are told, what they learn from, and what preflight says of them."""

import pytest

from infra.errors import BadInput
from models.config.data import ArithmeticData, MeasuresData
from models.config.engines import SamplingConfig
from models.config.environments import DialogueEnvironment
from models.config.policy import ScratchPolicy
from models.config.training import WarmupConfig
from models.config.users import DirectoryUser, TrainedUser
from models.data.problems import Message, Problem, load_problems
from models.environments.transcripts import Transcript, instructed, user_examples
from models.inspection.users import check_user
from tests.support.policies import write_policy

DATA = MeasuresData(train_problems=300, heldout_problems=30)
SAMPLING = SamplingConfig(max_new_tokens=16)


def dialogue(model=None, instructions="width {width}\nheight {height}\n"):
    shape = ScratchPolicy(hidden_size=16, intermediate_size=16, context=64)
    return DialogueEnvironment(
        model=model or TrainedUser(shape=shape), instructions=instructions, sampling=SAMPLING, prompts="text"
    )


def test_every_measure_is_answered_by_the_one_that_is_asked_for():
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


def test_a_user_learns_what_worked_episodes_say_to_each_turn():
    examples = user_examples(dialogue(), DATA, warmup=WarmupConfig(steps=10, batch_size=8), seed=1)
    assert len(examples) == 80
    for prompt, completion, *_ in examples:
        width, height, question = prompt.splitlines()
        told = {"width?": width, "height?": height}[question]
        assert completion == f"\n{told.split()[1]}\n"


def test_a_dialogue_is_read_with_roles_swapped_as_a_chat_and_as_text():
    told = Transcript("Be brief.", ("How?", "Why?"), ("So.",))
    assert told.messages == (
        Message("system", "Be brief."),
        Message("user", "How?"),
        Message("assistant", "So."),
        Message("user", "Why?"),
    )
    assert told.text == "Be brief.How?So.Why?"


def test_instructions_have_values_as_json_but_texts_as_they_are_and_other_braces_stand():
    problem = {"size": 7.5, "lid": True, "name": "Ada", "parts": ["a", {"b": None}]}
    assert instructed("{size} {lid} {name} {parts} {} {a b}", problem) == '7.5 true Ada ["a", {"b": null}] {} {a b}'
    with pytest.raises(ValueError, match=r"the problem has no 'sise', did you mean 'size'\?"):
        instructed("{sise}", problem)


def refusal(environment, problems):
    with pytest.raises(BadInput) as refused:
        check_user(environment, problems=problems, gpus=0)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_user_that_could_never_reply_is_refused_before_the_run(tmp_path):
    problems = load_problems(DATA, "train", 0)
    assert check_user(dialogue(), problems=problems, gpus=0) > 0
    said = refusal(dialogue(instructions="{width} " * 60), problems)
    assert said.startswith("rollout.environment.model: instructions have up to ")
    assert said.endswith("a reply up to 16, expected at most 64 together: the context of the model that plays the user")
    said = refusal(dialogue(instructions="{widht}"), problems)
    assert said.startswith("rollout.environment.model: train problem 0: instructions: the problem has no 'widht'")
    said = refusal(dialogue(), load_problems(ArithmeticData(train_problems=4), "train", 0))
    assert "expected a worked episode, which a user of kind 'trained' learns from, found none" in said


def test_a_template_that_takes_no_system_message_is_refused_before_the_run(tmp_path):
    write_policy(tmp_path / "user")
    refuses = "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    template = "{% for m in messages %}" + refuses + "{{ m.content }}{% endfor %}"
    (tmp_path / "user" / "chat_template.jinja").write_text(template)
    problem = Problem("train.jsonl:1", "A box.", "", columns={"width": 1, "height": 2})
    said = refusal(dialogue(DirectoryUser(path=tmp_path / "user")), [problem])
    assert "the user's dialogue" in said
    assert "no system" in said
