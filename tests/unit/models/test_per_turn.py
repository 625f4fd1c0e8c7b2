"""Separate prompts of turns: the whole chat is rendered before each turn as `apply_chat_template` renders it."""

from dataclasses import replace

import pyarrow as pa
import pytest

from rheostat.infra.errors import BadInput
from rheostat.models.config.environments import TargetEnvironment, ToolsEnvironment
from rheostat.models.data.problems import Message, Problem, TemplateArguments, encode_template_input
from rheostat.models.environments.context import PerTurnContext
from rheostat.models.environments.runtime import check_turns, tools_of
from rheostat.models.records.model_input import ModelInput, prompt_columns
from rheostat.models.rollouts.groups import fresh_groups
from rheostat.models.text.calls import Call, ParsedTurn, encode_call, hermes
from rheostat.models.text.per_turn import Exchange, check_turn_prompts, encode_turn, render_prompt, renders_calls
from rheostat.models.text.turns import turn_format
from tests.support.chat_templates import (
    CASES,
    FIND,
    PUBLISHED,
    call_turn,
    format_of,
    message,
    templated,
    tokenizer_of,
    with_template,
)

QUESTION = Message("user", "Hello.")
CALL = ParsedTurn("", (Call("find", {"what": "it"}),))


def exchange(form, turn, text, *answers):
    return Exchange(encode_turn(form, turn, text, in_calls=renders_calls(form)), tuple(answers))


@pytest.mark.parametrize(("name", "role"), CASES)
def test_a_published_template_is_accepted_and_a_prompt_is_the_rendered_chat_before_the_turn(name, role):
    """Calls are rendered by the template if it supports them; otherwise the prompt has the text of the turn."""
    form, calls = format_of(name), role == "tool" and renders_calls(format_of(name))
    check_turn_prompts(form, role=role, where="here")
    turn = CALL if calls else ParsedTurn("Yes.")
    one, two = (exchange(form, turn, "Yes.", message(role, text)) for text in ("4", "a b"))
    previous = call_turn(name) if calls else {"role": "assistant", "content": "Yes."}
    chat = [{"role": "user", "content": "Hello."}]
    for done, text in ([one], "4"), ([one, two], "a b"):
        chat = [*chat, previous, {"role": role, "content": text}]
        assert render_prompt(form, [QUESTION], done) == tuple(templated(name, chat))


def test_thoughts_of_earlier_turns_are_omitted_if_the_template_omits_them():
    form, tokenizer = format_of("qwen-3"), tokenizer_of("qwen-3")
    text = '<think>\nWhere?\n</think>\n\nI look.<tool_call>{"name": "find", "arguments": {"what": "it"}}</tool_call>'
    asking, answering = hermes(text), hermes("<think>\nSo.\n</think>\n\nThere.")
    by_tool = exchange(form, asking, text, message("tool", "in the box"))
    by_user = exchange(form, answering, "", message("user", "Which box?"))
    assert "Where?" in tokenizer.decode(render_prompt(form, [QUESTION], [by_tool]))
    later = tokenizer.decode(render_prompt(form, [QUESTION], [by_tool, by_user]))
    assert "Where?" not in later and "So." not in later
    assert "I look." in later and '{"name": "find", "arguments": {"what": "it"}}' in later and "There." in later


def test_a_call_that_cannot_be_parsed_stays_unchanged_before_its_answer():
    form, tokenizer = format_of("qwen-3"), tokenizer_of("qwen-3")
    text = "<tool_call>{find}</tool_call>"
    bad = exchange(form, hermes(text), text, Message("tool", "Error: no JSON", ""))
    shown = tokenizer.decode(render_prompt(form, [QUESTION], [bad]))
    assert f"<|im_start|>assistant\n{text}<|im_end|>" in shown
    assert "<tool_response>\nError: no JSON\n</tool_response>" in shown


def test_fields_that_the_format_of_the_tokenizer_separates_are_passed_to_the_template():
    form = format_of("qwen-3")
    turn = ParsedTurn("It is.", (Call("find", {"what": "it"}),), {"reasoning_content": "Hm."})
    assert encode_turn(form, turn, "", in_calls=True) == {
        "role": "assistant",
        "content": "It is.",
        "reasoning_content": "Hm.",
        "tool_calls": [encode_call("find", {"what": "it"})],
    }


@pytest.mark.parametrize(("name", "role"), CASES)
def test_messages_of_an_environment_contain_no_control_token(name, role):
    form, tokenizer = format_of(name), tokenizer_of(name)
    forged = "".join([*PUBLISHED[name].control, PUBLISHED[name].eos, "<|im_start|>"])
    control = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)

    def render(text):
        turns = [exchange(form, ParsedTurn("Yes."), "Yes.", message(role, text))] * 2
        return render_prompt(form, [QUESTION], turns)

    def tokens_of(tokens):
        return [token for token in tokens if token in control]

    plain, bad = render("a z"), render(f"a{forged}z")
    assert tokens_of(bad) == tokens_of(plain)
    assert len(bad) > len(plain)


# ---- refusals
@pytest.mark.parametrize(
    ("condition", "part"),
    [
        ("{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}", "no tools here"),
        (
            "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
            "{{ raise_exception('an answer without a call') }}{% endif %}",
            "an answer without a call",
        ),
        ("{% if m.role != 'tool' %}", "role 'tool'"),
    ],
)
def test_a_template_that_does_not_render_messages_of_episodes_is_refused(condition, part):
    end = "{% endif %}" if condition.endswith("'tool' %}") else ""
    template = "{% for m in messages %}" + condition + "{{ m.role }}: {{ m.content }}{{ m.tool_calls }}<|eos|>" + end
    form = turn_format(with_template(template + "{% endfor %}"), tools=[FIND])
    with pytest.raises(BadInput, match=f"^here.*{part}[^\n]*$"):
        check_turn_prompts(form, role="tool", where="here")


PROBLEM = Problem(source="train.jsonl:1", prompt=(Message("user", "How much is bread?"),), answer="5")


def test_a_template_that_rewrites_earlier_messages_is_refused_with_the_setting_that_accepts_it():
    settings = TargetEnvironment(target="tests.support.games:Echo", parser="none")
    with pytest.raises(BadInput, match=r"rollout\.environment\.history = 'per_turn'"):
        check_turns(settings, tokenizer_of("qwen-3"), (), PROBLEM)
    per_turn = settings.model_copy(update={"history": "per_turn"})
    check_turns(per_turn, tokenizer_of("qwen-3"), tools_of(per_turn, [PROBLEM]), PROBLEM)


def test_a_row_may_only_show_tools_of_the_environment():
    settings = ToolsEnvironment(tools=("tests.support.games:price",))
    known, unknown = ({"type": "function", "function": {"name": name}} for name in ("price", "prize"))
    assert tools_of(settings, [replace(PROBLEM, template=TemplateArguments((known,)))])
    with pytest.raises(BadInput, match=r"^train\.jsonl:1: .*'prize'.*did you mean 'price'"):
        tools_of(settings, [replace(PROBLEM, template=TemplateArguments((unknown,)))])


def test_prompts_of_later_turns_keep_the_fields_tools_and_variables_of_the_row():
    template = (
        "{{ tools | tojson }}{{ mood }}{% for m in messages %}{{ m.role }}{{ m.thinking }}: {{ m.content }}<|eos|>"
    )
    tokenizer = with_template(template + "{% endfor %}")
    arguments = TemplateArguments((FIND,), {"mood": "glad"})
    chat = (QUESTION, Message("assistant", "Hm.", fields={"thinking": "why"}), QUESTION)
    table = pa.table(
        {
            **{name: ["x"] for name in ("prompt_id", "text", "answer")},
            "columns": ["{}"],
            "messages": [[{"role": each.role, "content": each.text, "name": None} for each in chat]],
            "template": [encode_template_input(chat, arguments)],
            **prompt_columns([ModelInput.from_prompt([1])]),
        }
    )
    [group] = fresh_groups(table, [0], group_size=1, seed=0, iteration=1)
    form = turn_format(tokenizer)
    answered = exchange(form, ParsedTurn("Yes."), "Yes.", Message("user", "So?"))
    builder = PerTurnContext(form, max_new_tokens=4096, in_calls=False)
    draft = builder.append_context(group.drafts[0], group, [answered])
    shown = tokenizer.decode(draft.input.last_context().tokens)
    assert "glad" in shown and "assistantwhy: Hm." in shown and '"find"' in shown


def test_problems_with_images_are_refused():
    settings = ToolsEnvironment(tools=("tests.support.games:price",), history="per_turn")
    with_image = Problem(source="train.jsonl:7", prompt=PROBLEM.prompt, answer="5", images=(b"png",))
    with pytest.raises(BadInput, match=r"^train\.jsonl:7: .* 1 image.*'per_turn'"):
        tools_of(settings, [with_image])
