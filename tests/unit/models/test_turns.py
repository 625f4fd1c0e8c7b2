"""What stands between two turns of a chat."""

import pytest

from models.data.problems import Message
from models.text.tokenizer import render
from tests.support.chat_templates import tokenizer_of

FIND = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Find a thing.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
    },
}


@pytest.mark.parametrize("name", ["qwen-2.5", "mistral-v3", "granite-3"])
def test_tools_are_shown_as_transformers_shows_them(name):
    tokenizer = tokenizer_of(name)
    chat = (Message("user", "Where is it?"),)
    expected = tokenizer.apply_chat_template(
        [turn.spelt() for turn in chat], tools=[FIND], tokenize=False, add_generation_prompt=True
    )
    assert "Find a thing." in expected
    assert render([chat], tokenizer, sources=["a"], tools=[FIND]) == [expected]
