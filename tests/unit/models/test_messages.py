"""Fields of messages, tools and template variables: read from files as they are, and rendered as transformers does."""

from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rheostat.models.config.data import FileData
from rheostat.models.config.preferences import FilePreferences
from rheostat.models.data.examples import Example
from rheostat.models.data.preferences import load_preferences
from rheostat.models.data.problems import (
    Message,
    TemplateArguments,
    decode_template_input,
    encode_template_input,
    load_problems,
)
from rheostat.models.text.sequences import example_inputs
from rheostat.models.text.template_files import copy_named_templates
from rheostat.models.text.tokenizer import load_tokenizer, render, tokenize_problems
from rheostat.models.text.unread_fields import count_unread_fields
from tests.support.chat_templates import FIND, originals, tokenizer_of, with_template
from tests.support.data_files import write_lines

CALL = {"id": "call00001", "type": "function", "function": {"name": "find", "arguments": {"what": "it"}}}
OTHER_CALL = {"id": "call00002", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ANSWERED = [
    {"role": "user", "content": "Where is it?"},
    {"role": "assistant", "content": None, "reasoning_content": "I must look.", "tool_calls": [CALL]},
    {"role": "tool", "name": "find", "tool_call_id": "call00001", "content": "Here."},
    {"role": "user", "content": "Thanks."},
]
SHOW_ALL = "{% for m in messages %}{{ m | tojson }}{% endfor %}{{ tools | tojson }}{{ mood }}"


def drop_nulls(message):
    """Return a message as transformers passes it to a template."""
    return {name: value for name, value in message.items() if value is not None}


def load(path, **keys):
    return load_problems(FileData(path=path, heldout_path=path, **keys), "train", 0)


def load_chat(tmp_path, *messages, **columns):
    [problem] = load(write_lines(tmp_path / "a.jsonl", {"prompt": messages, "answer": "x", **columns}))
    return problem


def test_messages_keep_the_fields_of_the_file(tmp_path):
    problem = load_chat(tmp_path, *ANSWERED)
    assert [message.encode() for message in problem.prompt] == [drop_nulls(message) for message in ANSWERED]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "system", "content": ""},
        {"role": "tool", "content": "", "tool_call_id": "1"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "assistant", "content": None, "thinking": "Hm."},
        {"role": "user", "content": "Hi.", "name": "Ana"},
    ],
)
def test_a_message_may_be_empty_if_its_role_or_fields_give_it_a_meaning(message, tmp_path):
    problem = load_chat(tmp_path, message, {"role": "user", "content": "Go."})
    assert problem.prompt[0].encode() == drop_nulls(message)


@pytest.mark.parametrize(
    "call",
    [
        CALL | {"function": CALL["function"] | {"arguments": '{"what": "it"}'}},
        '{"id": "call00001", "type": "function", "function": {"name": "find", "arguments": "{\\"what\\": \\"it\\"}"}}',
        CALL | {"index": None},
    ],
)
def test_calls_with_arguments_as_objects_and_as_text_are_the_same_problem(call, tmp_path):
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    problem = load_chat(tmp_path, ANSWERED[0], turn, ANSWERED[2])
    as_object = load_chat(tmp_path, ANSWERED[0], turn | {"tool_calls": [CALL]}, ANSWERED[2])
    assert problem.identity == as_object.identity
    shown = with_template("{% for m in messages %}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}")
    texts = [prompt.text for prompt in tokenize_problems([problem, as_object], shown)]
    assert texts[0] == texts[1]


CALLS = (
    "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ SHOWN }}{% endfor %}{% endfor %}"
)
OBJECT, TEXT = {"a": 2, "b": [1, 2.5]}, '{"a":2,"b":[1,2.50]}'


@pytest.mark.parametrize(
    ("shown", "arguments", "text"),
    [
        ("c.function.arguments | tojson", OBJECT, '{"a": 2, "b": [1, 2.5]}'),
        ("c.function.arguments | tojson", TEXT, '{"a": 2, "b": [1, 2.5]}'),
        ("c.function.arguments", OBJECT, '{"a": 2, "b": [1, 2.5]}'),
        ("c.function.arguments", TEXT, TEXT),
        ("'' + c.function.arguments", OBJECT, '{"a": 2, "b": [1, 2.5]}'),
        ("'' + c.function.arguments", TEXT, TEXT),
        ("c.function.arguments if c.function.arguments is string else c.function.arguments | tojson", TEXT, TEXT),
        ("c.function.arguments.items() | list", OBJECT, "[('a', 2), ('b', [1, 2.5])]"),
        ("c.function.arguments.items() | list", TEXT, "[('a', 2), ('b', [1, 2.5])]"),
        ("c.function.name", TEXT, "add"),
    ],
)
def test_arguments_of_calls_have_the_form_that_the_template_shows(shown, arguments, text, tmp_path):
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    problem = load_chat(tmp_path, {"role": "assistant", "content": "", "tool_calls": [call]}, ANSWERED[2])
    [prompt] = tokenize_problems([problem], with_template(CALLS.replace("SHOWN", shown)))
    assert prompt.text == f"{text}Here."


def test_the_form_of_arguments_is_that_of_the_template_for_tools_and_of_the_variables(tmp_path):
    strict = "{{ mood.strip() }}" + CALLS.replace("SHOWN", "'' + c.function.arguments")
    tokenizer = with_template({"default": "{% for m in messages %}{{ m.content }}{% endfor %}", "tool_use": strict})
    turn = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    problem = load_chat(tmp_path, turn, ANSWERED[2], tools=[FIND], chat_template_kwargs={"mood": "glad"})
    [prompt] = tokenize_problems([problem], tokenizer)
    assert prompt.text == 'glad{"what": "it"}Here.'


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}{{ m.content }};{% endfor %}", "Hi there.;"),
        ("{% for m in messages %}{{ '' + m.content }};{% endfor %}", "Hi there.;"),
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }}|{% endfor %};{% endfor %}", "Hi| there.|;"),
    ],
)
def test_a_content_of_several_texts_never_becomes_a_python_list(template, text, tmp_path):
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": " there."}]
    [prompt] = tokenize_problems([load_chat(tmp_path, {"role": "user", "content": parts})], with_template(template))
    assert prompt.text == text


@pytest.mark.parametrize("message", [{"content": None}, {}])
def test_a_content_of_null_is_absent_as_in_transformers(message, tmp_path):
    template = "{% for m in messages %}{{ m.role }}{{ 'yes' if 'content' in m else 'no' }};{% endfor %}"
    problem = load_chat(tmp_path, {"role": "assistant", "tool_calls": [CALL], **message}, ANSWERED[2])
    assert tokenize_problems([problem], with_template(template))[0].text == "assistantno;toolyes;"


def test_a_variable_may_have_any_name_that_is_not_reserved(tmp_path):
    problem = load_chat(tmp_path, ANSWERED[0], chat_template_kwargs={"chat": "a", "text": "b", "kind": "c"})
    [prompt] = tokenize_problems([problem], with_template("{{ chat }}{{ text }}{{ kind }}"))
    assert prompt.text == "abc"


def test_control_tokens_in_names_of_arguments_are_text(tmp_path):
    tokenizer = tokenizer_of("qwen-3")
    call = {"function": {"name": "find", "arguments": {"<|im_end|>": 1, "type": "<|im_end|>"}}}
    problem = load_chat(tmp_path, ANSWERED[0], {"role": "assistant", "content": "", "tool_calls": [call]}, ANSWERED[2])
    [prompt] = tokenize_problems([problem], tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert prompt.text.count("<|im_end|>") == list(prompt.input.tokens).count(end) + 2


def test_null_fields_of_parquet_files_are_absent(tmp_path):
    chats = [
        ANSWERED,
        [{"role": "user", "content": "Go."}, {"role": "assistant", "tool_calls": [OTHER_CALL]}, ANSWERED[2]],
    ]
    tools = [[FIND], [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]]
    rows = [{"prompt": chat, "answer": "x", "tools": shown} for chat, shown in zip(chats, tools, strict=True)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    as_table, as_lines = load(tmp_path / "a.parquet"), load(write_lines(tmp_path / "a.jsonl", *rows))
    for one, other in zip(as_table, as_lines, strict=True):
        assert (one.prompt, one.template, one.identity) == (other.prompt, other.template, other.identity)


def test_rows_set_tools_and_variables_that_take_precedence_over_the_configured_ones(tmp_path):
    chat, text = [{"role": "user", "content": "Go."}], '[{"type": "function", "function": {"name": "add"}}]'
    rows = [
        {"prompt": chat, "answer": "x", "tools": [FIND], "chat_template_kwargs": {"mood": "glad"}},
        {"prompt": chat, "answer": "y", "tools": text, "chat_template_kwargs": '{"effort": "low"}'},
        {"prompt": chat, "answer": "z", "tools": None},
    ]
    problems = load(write_lines(tmp_path / "a.jsonl", *rows), chat_template_kwargs={"mood": "calm"})
    assert [problem.template for problem in problems] == [
        TemplateArguments((FIND,), {"mood": "glad"}),
        TemplateArguments(({"type": "function", "function": {"name": "add"}},), {"mood": "calm", "effort": "low"}),
        TemplateArguments((), {"mood": "calm"}),
    ]
    texts = [prompt.text for prompt in tokenize_problems(problems, with_template(SHOW_ALL))]
    assert [text[-4:] for text in texts] == ["glad", "calm", "calm"]
    assert ["find" in texts[0], "add" in texts[1], "null" in texts[2]] == [True] * 3


def test_a_file_with_only_role_and_content_gives_the_prompts_and_identities_of_earlier_versions(tmp_path):
    rows = [{"prompt": ANSWERED[:1], "answer": "x"}, {"prompt": ANSWERED[-1:], "answer": "y"}]
    path = write_lines(tmp_path / "a.jsonl", *rows)
    now, before = load(path), load(path, message_fields="drop", tools_column=None, chat_template_kwargs_column=None)
    assert now == before
    assert now[0].identity == '[["user", "Where is it?"]]'


def test_other_fields_and_columns_can_be_ignored_as_in_stored_runs(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "Go.", "id": 7}], "answer": "x", "tools": "hammer"}]
    [problem] = load(write_lines(tmp_path / "a.jsonl", *rows), message_fields="drop", tools_column="")
    assert (problem.prompt, problem.template) == ((Message("user", "Go."),), TemplateArguments())


def test_the_input_of_a_template_is_stored_and_read_without_changes(tmp_path):
    problem = load_chat(tmp_path, *ANSWERED, tools=[FIND], chat_template_kwargs={"mood": "glad"})
    encoded = encode_template_input(problem.prompt, problem.template)
    assert decode_template_input(encoded) == (problem.prompt, problem.template)
    assert encode_template_input((Message("user", "Go."),), TemplateArguments()) == ""


@pytest.mark.skipif(not originals(), reason="needs TRL")
@pytest.mark.parametrize(
    "name", [name for name in originals() if name.startswith(("qwen", "llama3_", "glm", "gptoss", "gemma4"))]
)
def test_published_templates_render_calls_as_transformers_does(name, tmp_path):
    tokenizer = with_template(originals()[name])
    problem = load_chat(tmp_path, *ANSWERED, tools=[FIND], chat_template_kwargs={"enable_thinking": False})
    [text] = render([problem.prompt], tokenizer, sources=["here"], arguments=[problem.template])
    expected = tokenizer.apply_chat_template(
        ANSWERED, tools=[FIND], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    assert text == expected


def test_a_template_that_joins_arguments_as_text_receives_text(tmp_path):
    tokenizer = tokenizer_of("deepseek-v3")
    [text] = render([load_chat(tmp_path, *ANSWERED).prompt], tokenizer, sources=["here"])
    assert '{"what": "it"}' in text


def test_a_call_without_content_never_becomes_the_word_none(tmp_path):
    tokenizer = with_template("{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}")
    [text] = render([load_chat(tmp_path, *ANSWERED).prompt], tokenizer, sources=["here"])
    assert text == "user: Where is it?;assistant: ;tool: Here.;user: Thanks.;"


def test_values_that_a_template_does_not_show_are_counted(tmp_path):
    each = load_chat(tmp_path, *ANSWERED, tools=[FIND], chat_template_kwargs={"mood": "glad"})
    tokenizer = with_template("{% for m in messages %}{{ m.content or '' }}{{ m.tool_calls }}{% endfor %}{{ mood }}")
    assert count_unread_fields([(each.prompt, each.template)] * 2, tokenizer) == {
        "name": 2,
        "reasoning_content": 2,
        "tool_call_id": 2,
        "tools": 2,
    }
    assert count_unread_fields([(each.prompt, each.template)], with_template(SHOW_ALL)) == {}
    plain = with_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert count_unread_fields([((Message("user", "a"),), each.template)], plain) == {
        "chat_template_kwargs.mood": 1,
        "tools": 1,
    }


@pytest.mark.parametrize(
    ("template", "unread"),
    [
        # `name` occurs in the template, but only for tools
        ("{% for m in messages %}{{ m.content }}{% if m.role == 'tool' %}{{ m.name }}{% endif %}{% endfor %}", "name"),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.name }}{{ m.content }}{% endfor %}",
            "content of role developer",
        ),
    ],
)
def test_a_value_is_unread_if_the_prompts_do_not_depend_on_it(template, unread, tmp_path):
    problem = load_chat(tmp_path, {"role": "developer", "content": "Be brief."}, ANSWERED[-1] | {"name": "Ana"})
    assert count_unread_fields([(problem.prompt, problem.template)], with_template(template)) == {unread: 1}


def test_training_examples_and_pairs_receive_tools_and_variables(tmp_path):
    tokenizer = with_template("{{ tools | tojson }}{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}")
    chat, arguments = (Message("user", "Go."),), TemplateArguments((FIND,), {"mood": "glad"})
    examples = [Example(chat, "x", template=each) for each in (arguments, replace(arguments, kwargs={"mood": "calm"}))]
    glad, calm = (tokenizer.decode(each.tokens) for each in example_inputs(examples, tokenizer, source="here"))
    assert "find" in glad
    assert glad.replace("glad", "calm") == calm
    row = {"prompt": [{"role": "user", "content": "Go."}], "chosen": "a", "rejected": "b", "tools": [FIND]}
    path = write_lines(tmp_path / "pairs.jsonl", row)
    config = FilePreferences(path=path, heldout_path=path, chat_template_kwargs={"mood": "glad"})
    with pytest.raises(Exception, match="also the prompt of a training pair"):
        load_preferences(config, FileData(path=path), split="heldout", seed=0)
    [pair] = load_preferences(config, FileData(path=path), split="train", seed=0)
    assert pair.template == arguments


@pytest.mark.parametrize("folder", [True, False])
def test_named_templates_are_chosen_as_transformers_does(folder, tmp_path):
    tokenizer = with_template(
        {"default": "plain {{ messages[0].content }}", "tool_use": "tools {{ messages[0].content }}"}
    )
    tokenizer.save_pretrained(tmp_path, save_jinja_files=folder)
    assert (tmp_path / "additional_chat_templates/tool_use.jinja").is_file() == folder
    chat, shown = (Message("user", "Go."),), TemplateArguments((FIND,))
    loaded = load_tokenizer(tmp_path)
    texts = render([chat, chat], loaded, sources=["here"] * 2, arguments=[TemplateArguments(), shown])
    assert texts == ["plain Go.", "tools Go."]


def test_named_templates_are_exported_with_a_policy(tmp_path):
    with_template({"default": "a", "tool_use": "b"}).save_pretrained(tmp_path / "one", save_jinja_files=True)
    (tmp_path / "two").mkdir()
    copy_named_templates(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "two/additional_chat_templates/tool_use.jinja").read_text() == "b"
