"""What preflight says of environments, in one line, before anything is written."""

import pytest

from infra.errors import BadInput
from models.config.environments import TargetEnvironment, ToolsEnvironment
from models.data.problems import Message, Problem
from models.environments.scene import check_turns, tools_of
from tests.support.policies import small_tokenizer

CHAT = Problem(source="train.jsonl:1", prompt=(Message("user", "How much is bread?"),), answer="5")
TEXT = Problem(source="train.jsonl:1", prompt="How much is bread?", answer="5")
TOOLS = ToolsEnvironment(tools=("tests.support.games:price",), parser="hermes")


def refusal(settings, problem, tokenizer=None) -> str:
    with pytest.raises(BadInput) as refused:
        check_turns(settings, tokenizer or small_tokenizer(), tools_of(settings, [problem]), problem)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_template_that_hides_tools_is_refused():
    assert "does not show the tool 'price'" in refusal(TOOLS, CHAT)


def test_prompts_of_another_kind_are_refused():
    assert refusal(TOOLS, TEXT).startswith("train.jsonl:1: expected chats as prompts, found plain text")
    text = TargetEnvironment(target="tests.support.games:Echo", prompts="text", parser="none")
    assert refusal(text, CHAT).startswith("train.jsonl:1: expected plain text as prompts, found chats")


def test_an_environment_whose_episodes_do_not_begin_is_refused():
    broken = TargetEnvironment(target="tests.support.games:Unready", prompts="text", parser="none")
    assert refusal(broken, TEXT).endswith("an episode does not begin: FileNotFoundError: no board")


def test_an_unknown_parser_is_refused_with_the_nearest():
    misspelt = TargetEnvironment(target="tests.support.games:Echo", prompts="text", parser="hermez")
    assert "did you mean 'hermes'?" in refusal(misspelt, TEXT)


def test_an_option_that_the_class_does_not_take_is_refused():
    options = TargetEnvironment(target="tests.support.games:Echo", prompts="text", parser="none", options={"levl": 1})
    assert "levl" in refusal(options, TEXT)
