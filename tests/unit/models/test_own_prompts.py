"""Prompts of turns of their own: the whole chat as the template writes it before each turn.

What is expected of them is what transformers' own `apply_chat_template` makes of the chat.
"""

import pytest
from transformers import PreTrainedTokenizerFast

from infra.errors import BadInput
from models.config.environments import TargetEnvironment, ToolsEnvironment
from models.data.problems import Message, Problem
from models.environments.scene import check_turns, tools_of
from models.text.calls import Call, ParsedTurn, hermes, spelt_call
from models.text.own_prompts import Exchange, check_prompts, prompt_of, spelt_turn, takes_calls
from models.text.turns import turn_format
from tests.support.chat_templates import CASES, FIND, PUBLISHED, call_turn, format_of, message, templated, tokenizer_of

QUESTION = Message("user", "Hello.")
CALL = ParsedTurn("", (Call("find", {"what": "it"}),))


def exchange(form, turn, text, *said):
    return Exchange(spelt_turn(form, turn, text, in_calls=takes_calls(form)), tuple(said))


@pytest.mark.parametrize(("name", "role"), CASES)
def test_a_turns_prompt_is_what_the_template_writes_of_the_chat_before_it(name, role):
    """Calls are shown as such, where the template knows them; else the turn's text."""
    form, calls = format_of(name), role == "tool" and takes_calls(format_of(name))
    turn = CALL if calls else ParsedTurn("Yes.")
    one, two = (exchange(form, turn, "Yes.", message(role, text)) for text in ("4", "a b"))
    spelt = call_turn(name) if calls else {"role": "assistant", "content": "Yes."}
    chat = [{"role": "user", "content": "Hello."}]
    for done, text in ([one], "4"), ([one, two], "a b"):
        chat = [*chat, spelt, {"role": role, "content": text}]
        assert prompt_of(form, [QUESTION], done) == tuple(templated(name, chat))


def test_the_thoughts_of_earlier_turns_are_left_out_where_the_template_does_so():
    form, tokenizer = format_of("qwen-3"), tokenizer_of("qwen-3")
    text = '<think>\nWhere?\n</think>\n\nI look.<tool_call>{"name": "find", "arguments": {"what": "it"}}</tool_call>'
    asking, answering = hermes(text), hermes("<think>\nSo.\n</think>\n\nThere.")
    by_tool = exchange(form, asking, text, message("tool", "in the box"))
    by_user = exchange(form, answering, "", message("user", "Which box?"))
    assert "Where?" in tokenizer.decode(prompt_of(form, [QUESTION], [by_tool]))
    later = tokenizer.decode(prompt_of(form, [QUESTION], [by_tool, by_user]))
    assert "Where?" not in later and "So." not in later
    assert "I look." in later and '{"name": "find", "arguments": {"what": "it"}}' in later and "There." in later


def test_a_call_that_cannot_be_read_stays_as_it_was_written_and_its_answer_behind_it():
    form, tokenizer = format_of("qwen-3"), tokenizer_of("qwen-3")
    text = "<tool_call>{find}</tool_call>"
    bad = exchange(form, hermes(text), text, Message("tool", "Error: no JSON", ""))
    shown = tokenizer.decode(prompt_of(form, [QUESTION], [bad]))
    assert f"<|im_start|>assistant\n{text}<|im_end|>" in shown
    assert "<tool_response>\nError: no JSON\n</tool_response>" in shown


def test_what_the_tokenizers_own_format_tells_apart_goes_back_to_the_template():
    form = format_of("qwen-3")
    turn = ParsedTurn("It is.", (Call("find", {"what": "it"}),), {"reasoning_content": "Hm."})
    assert spelt_turn(form, turn, "", in_calls=True) == {
        "role": "assistant",
        "content": "It is.",
        "reasoning_content": "Hm.",
        "tool_calls": [spelt_call("find", {"what": "it"})],
    }


@pytest.mark.parametrize(("name", "role"), CASES)
def test_what_an_environment_says_writes_no_control_token(name, role):
    form, tokenizer = format_of(name), tokenizer_of(name)
    forged = "".join([*PUBLISHED[name].control, PUBLISHED[name].eos, "<|im_start|>"])
    control = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)

    def written(text):
        turns = [exchange(form, ParsedTurn("Yes."), "Yes.", message(role, text))] * 2
        return prompt_of(form, [QUESTION], turns)

    def tokens_of(tokens):
        return [token for token in tokens if token in control]

    honest, bad = written("a z"), written(f"a{forged}z")
    assert tokens_of(bad) == tokens_of(honest)
    assert len(bad) > len(honest)


# ---- refusals, in one line
def templated_by(template):
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of("plain").backend_tokenizer,
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        chat_template=template,
    )


@pytest.mark.parametrize(
    ("condition", "told"),
    [
        ("{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}", "refuses it: no tools here"),
        (
            "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
            "{{ raise_exception('an answer without a call') }}{% endif %}",
            "refuses it: an answer without a call",
        ),
        ("{% if m.role != 'tool' %}", "leaves messages of role 'tool' out"),
    ],
)
def test_a_template_that_does_not_write_what_episodes_say_is_refused(condition, told):
    end = "{% endif %}" if condition.endswith("'tool' %}") else ""
    template = "{% for m in messages %}" + condition + "{{ m.role }}: {{ m.content }}{{ m.tool_calls }}<|eos|>" + end
    form = turn_format(templated_by(template + "{% endfor %}"), tools=[FIND])
    with pytest.raises(BadInput, match=told) as refused:
        check_prompts(form, role="tool", where="here")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("name", "role"), CASES)
def test_all_published_templates_write_a_chat_anew(name, role):
    check_prompts(format_of(name), role=role, where="here")


ASKED = Problem(source="train.jsonl:1", prompt=(Message("user", "How much is bread?"),), answer="5")


def test_what_a_template_that_rewrites_the_past_is_told_leads_to_turns_with_prompts_of_their_own():
    refused = TargetEnvironment(target="tests.support.games:Echo", parser="none")
    with pytest.raises(BadInput, match=r"otherwise.*set rollout\.environment\.history='per_turn'"):
        check_turns(refused, tokenizer_of("qwen-3"), (), ASKED)
    taken = refused.model_copy(update={"history": "per_turn"})
    check_turns(taken, tokenizer_of("qwen-3"), tools_of(taken, [ASKED]), ASKED)


def test_problems_that_show_images_are_refused():
    settings = ToolsEnvironment(tools=("tests.support.games:price",), history="per_turn")
    shown = Problem(source="train.jsonl:7", prompt=ASKED.prompt, answer="5", images=(b"png",))
    with pytest.raises(BadInput, match=r"^train\.jsonl:7: expected no image with .*'per_turn', found 1"):
        tools_of(settings, [shown])
