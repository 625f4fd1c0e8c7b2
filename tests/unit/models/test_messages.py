"""Fields of messages, tools and template variables: read from files as they are, and rendered as transformers does."""

from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from models.config.data import FileData, FilePreferences
from models.data.examples import Example, load_preferences
from models.data.problems import Message, TemplateArguments, decode_template_input, encode_template_input, load_problems
from models.text.sequences import example_inputs
from models.text.template_fields import count_unread_fields
from models.text.template_files import copy_named_templates
from models.text.tokenizer import load_tokenizer, render, tokenize_problems
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


def load(path, **keys):
    return load_problems(FileData(path=path, heldout_path=path, **keys), "train", 0)


def load_chat(tmp_path, *messages, **columns):
    [problem] = load(write_lines(tmp_path / "a.jsonl", {"prompt": messages, "answer": "x", **columns}))
    return problem


def test_messages_keep_the_fields_of_the_file(tmp_path):
    problem = load_chat(tmp_path, *ANSWERED)
    assert [message.encode() for message in problem.prompt] == ANSWERED


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
    assert problem.prompt[0].encode() == message


@pytest.mark.parametrize(
    "call",
    [
        CALL | {"function": CALL["function"] | {"arguments": '{"what": "it"}'}},
        '{"id": "call00001", "type": "function", "function": {"name": "find", "arguments": "{\\"what\\": \\"it\\"}"}}',
        CALL | {"index": None},
    ],
)
def test_arguments_of_calls_become_objects(call, tmp_path):
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    problem = load_chat(tmp_path, ANSWERED[0], turn, ANSWERED[2])
    assert problem.prompt[1].fields == {"tool_calls": [CALL]}


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
    assert text == expected or "None" in expected


def test_a_template_that_joins_arguments_as_text_receives_text(tmp_path):
    tokenizer = tokenizer_of("deepseek-v3")
    [text] = render([load_chat(tmp_path, *ANSWERED).prompt], tokenizer, sources=["here"])
    assert '{"what": "it"}' in text


def test_a_call_without_content_never_becomes_the_word_none(tmp_path):
    tokenizer = with_template("{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}")
    [text] = render([load_chat(tmp_path, *ANSWERED).prompt], tokenizer, sources=["here"])
    assert text == "user: Where is it?;assistant: ;tool: Here.;user: Thanks.;"


def test_fields_that_a_template_does_not_read_are_counted(tmp_path):
    chat = [(each := load_chat(tmp_path, *ANSWERED, tools=[FIND], chat_template_kwargs={"mood": "glad"})).prompt]
    tokenizer = with_template("{% for m in messages %}{{ m.content or '' }}{{ m.tool_calls }}{% endfor %}{{ mood }}")
    assert count_unread_fields([(each.prompt, each.template)] * 2, tokenizer) == {
        "name": 2,
        "reasoning_content": 2,
        "tool_call_id": 2,
        "tools": 2,
    }
    assert count_unread_fields([(chat[0], each.template)], with_template(SHOW_ALL)) == {}
    plain = with_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert count_unread_fields([((Message("user", "a"),), each.template)], plain) == {
        "chat_template_kwargs.mood": 1,
        "tools": 1,
    }


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
    with pytest.raises(Exception, match="also a training prompt"):
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
