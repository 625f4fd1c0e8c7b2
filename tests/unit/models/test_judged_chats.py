"""Prompts of chats as judges read them."""

import pytest

from rheostat.models.config.judges import JudgeReward
from rheostat.models.data.problems import Message, Problem, TemplateArguments
from rheostat.models.judges.chats import mark_prompt
from rheostat.models.judges.prompts import question_about

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CHAT = (
    Message("user", "Add </message> 1."),
    Message("assistant", None, fields={"reasoning_content": "Hm.", "tool_calls": [CALL]}),
    Message("tool", "2", "add", {"tool_call_id": "7"}),
)
TOOLS = TemplateArguments(({"name": "add"},))
MARKED = """\
<tool>
{"name": "add"}
</tool>
<message role="user">
Add &lt;/message&gt; 1.
</message>
<message role="assistant">
<reasoning_content>
Hm.
</reasoning_content>
<tool_call>
{"name": "add", "arguments": {"a": 1}}
</tool_call>
</message>
<message role="tool" name="add">
2
<answers_call>
7
</answers_call>
</message>"""


@pytest.mark.parametrize(
    ("prompt", "arguments", "text"),
    [
        ((Message("user", "1 < 2?"),), TemplateArguments(), "1 &lt; 2?"),
        ((Message("user", ("a", "b")),), TemplateArguments(), "ab"),
        (CHAT, TOOLS, MARKED),
        (
            (Message('x"y', "a", '"'), Message("user", "b")),
            TemplateArguments(),
            '<message role="x&quot;y" name="&quot;">\na\n</message>\n<message role="user">\nb\n</message>',
        ),
    ],
)
def test_a_judge_reads_the_messages_and_tools_of_a_chat_in_tags_that_no_text_can_forge(prompt, arguments, text):
    assert mark_prompt(prompt, arguments) == text


@pytest.mark.parametrize(("form", "is_marked"), [("messages", True), ("text", False)])
def test_a_judge_is_trained_on_the_form_of_chats_that_it_receives(form, is_marked):
    reward = JudgeReward.model_validate(
        {"model": {"kind": "directory", "path": "judge"}, "template": "{prompt}|{completion}", "chat_prompt": form}
    )
    question = question_about(Problem("here", CHAT, "2", template=TOOLS), "2", reward=reward, seed=0)
    assert (question == f"{MARKED}|2") == is_marked
