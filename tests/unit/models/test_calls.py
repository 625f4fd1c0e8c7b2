"""Tool calls in the text of a policy: parsed if well-formed, else reported to the policy, and never an exception."""

import json
import re
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_parsing import parse_response

from rheostat.infra.errors import BadInput
from rheostat.models.text.calls import PARSERS, Call, ParsedTurn, build_parser, hermes, keep_text, llama3_json
from rheostat.models.text.chats import CPU_SECONDS
from tests.support.chat_templates import PUBLISHED, tokenizer_of

ADD = {"name": "add", "arguments": {"a": 1, "b": [2, {"c": None}]}}
HERMES, LLAMA = json.dumps(ADD), json.dumps({"name": "add", "parameters": ADD["arguments"]})
PARAMETER = r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"
CALL_SCHEMA = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
XML_CALLS = {
    "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
    "close_pattern": r"</tool_call>\s*",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {"tag_pattern": PARAMETER, "value_parser": {"name": "json", "args": {"allow_non_json": True}}},
    "transform": CALL_SCHEMA,
}
JSON_CALLS = {"open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json"}
JSON_CALLS["transform"] = {"type": "function", "function": "{content}"}
ASSISTANT = "<|im_start|>assistant\n"
THINKING, CONTENT = {"open": "<think>", "close_pattern": r"</think>\s*"}, {"close_pattern": r"<\|im_end\|>\s*"}
XML = {"start_anchor": ASSISTANT, "fields": {"thinking": THINKING, "tool_calls": XML_CALLS, "content": CONTENT}}
"""Response template in the format of Qwen 3.5."""
JSON_REGION = {"start_anchor": ASSISTANT, "fields": {"tool_calls": JSON_CALLS, "content": {}}}


def parser_with_template(response_template, *, tools=()):
    """Return the parser of a tokenizer that has this response template."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of("qwen-2.5").backend_tokenizer,
        chat_template=PUBLISHED["qwen-2.5"].template,
        response_template=response_template,
    )
    return build_parser("auto", tokenizer, tools=tools)


# ---- well-formed calls


def test_hermes_reads_the_calls_and_keeps_the_other_text():
    text = f"One.<tool_call>\n{HERMES}\n</tool_call> Two. <tool_call>{HERMES}</tool_call>\n"
    assert hermes(text) == ParsedTurn("One. Two.", (Call(**ADD), Call(**ADD)))


def test_a_call_that_is_quoted_in_thoughts_or_arguments_is_text():
    call = {"name": "say", "arguments": {"text": "<tool_call>{}</tool_call>"}}
    thoughts = "<think>I may write <tool_call>{}</tool_call>.</think>"
    assert hermes(f"{thoughts}<tool_call>{json.dumps(call)}</tool_call>") == ParsedTurn(thoughts, (Call(**call),))


@pytest.mark.parametrize("before", ["", "\n ", "<|python_tag|>", "<think>Hm {}.</think>\n"])
def test_llama3_json_reads_a_turn_that_is_a_call(before):
    assert llama3_json(before + LLAMA).calls == (Call(**ADD),)
    assert llama3_json(f"{before}{LLAMA}; {LLAMA}\n").calls == (Call(**ADD), Call(**ADD))


@pytest.mark.parametrize("text", ["It is 4.", '{"answer": 4}', "So {x | x > 0}", "{", ""])
def test_text_without_calls_stays_as_it_is(text):
    assert llama3_json(text) == ParsedTurn(text)
    assert keep_text(f" <tool_call>{HERMES}{text}") == ParsedTurn(f" <tool_call>{HERMES}{text}")


# ---- malformed calls


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ('{"name": "add", "arguments": {"a": 1}', "'</tool_call> <tool_c'.*delimiter"),
        ('{"name": "add"}', '"arguments".*no object of arguments'),
        ('{"name": "add", "arguments": "{}"}', "no object of arguments"),
        ('{"name": 3, "arguments": {}}', "no name"),
        ('["add"]', r'\["add"\]'),
        ("add(1, 2)", r"JSON object.*'add\(1, 2\)"),
        ('{"name": "add", "arguments": {"a": 1e999}}', "number.* 1e999"),
        ('{"name": "add", "arguments": {"a": NaN}}', "number.* NaN"),
        ('{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}", "9{20}$"),
        ('{"name": "add", "arguments": {"a": "\\ud800"}}', "UTF-8"),
        ('{"name": "add", "arguments": "\\ud800"}', "UTF-8"),
        ('{"name": "add", "arguments": {"a": ' + "[" * 40 + "]" * 40 + "}}", "32 deep"),
        ("[" * 100000, "too deeply"),
        ("", "'</tool_call> <tool_c'.*value"),
    ],
)
def test_the_error_of_a_malformed_call_names_the_fault_and_the_next_call_is_read(body, error):
    following = '<tool_call>{"name": "b", "arguments": {}}</tool_call>'
    [call, after] = hermes(f"<tool_call>{body}</tool_call> {following}").calls
    assert re.search(error, call.error)
    assert "\n" not in call.error and len(call.error) < 200
    assert call.arguments == {}
    assert after == Call("b", {})


def test_an_incomplete_call_is_malformed():
    [unclosed] = hermes('<tool_call>{"name": "a", "arguments": {}}').calls
    assert re.search("</tool_call>.*end", unclosed.error)
    [python] = llama3_json('<|python_tag|>search.call(query="a")').calls
    assert re.search(r"JSON object.*'search\.call\(query", python.error)


# ---- arbitrary text
PIECES = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "</think>", "<think>", '{"name": "a", "arguments": {}}'),
    *('{"name": "a", "parameters": {"b": ', "{", "}", "[", "]", '"', "\\", "\\u12", ",", ":", ";", "1e999", "NaN", "-"),
    *('"name"', "\n", " ", "é", "\x00", "\u2028", "😀", "1" * 5000, "<function=a>", "<parameter=b>", "</parameter>"),
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=25).map("".join) | st.text(max_size=60)


@pytest.fixture(scope="module")
def parsers():
    return [*PARSERS.values(), *(parser_with_template(template) for template in (XML, JSON_REGION))]


@settings(max_examples=100)
@given(TEXTS)
@example("<tool_call>")
@example('{"name":')
def test_parsers_and_response_templates_raise_for_no_text(parsers, text):
    for parse in parsers:
        parsed = parse(text)
        assert len(parsed.text) <= len(text)
        for call in parsed.calls:
            assert bool(call.error) or bool(call.name)
            assert not (call.error and call.arguments)
            assert json.loads(json.dumps(call.arguments, allow_nan=False)) == call.arguments
            call.error.encode()


@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.dictionaries(st.text(max_size=5), st.sampled_from(PIECES) | st.text(max_size=9), max_size=3),
)
@example("", {"a": "</think>"})
@example("I think.", {"a": "<tool_call></think>", "b": "</think></tool_call>"})
def test_any_encoded_call_is_read(before, arguments):
    before = before.replace("<", "").replace("{", "")
    try:
        json.dumps(arguments, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return
    for ascii_only in (True, False):
        encoded = json.dumps({"name": "find", "arguments": arguments}, ensure_ascii=ascii_only)
        expected = (Call("find", arguments),)
        assert hermes(f"{before}<tool_call>{encoded}</tool_call>") == ParsedTurn(before.strip(), expected)
        assert llama3_json(f"{before}<|python_tag|>{encoded}") == ParsedTurn(before.strip(), expected)
        assert llama3_json(encoded) == ParsedTurn("", expected)


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize(
    "unit", [*PIECES, "<tool_call>{", '<tool_call>"', '<tool_call>["</tool_call>",', '{"name": ', "<|python_tag|>{"]
)
def test_the_time_of_a_parser_is_linear_in_the_length_of_the_text(unit):
    """Quadratic time would take minutes of CPU time for these texts, linear time takes a fraction of a second."""
    for parse in (hermes, llama3_json):
        started = time.process_time()
        parse(unit * (200_000 // len(unit)))
        parse(unit * (200_000 // len(unit)) + "</think>")
        assert time.process_time() - started < 5


# ---- formats of tokenizers


@pytest.mark.parametrize("name", sorted(name for name, known in PUBLISHED.items() if known.parser))
def test_the_chat_template_decides_the_parser(name):
    assert build_parser("auto", tokenizer_of(name)) is PARSERS[PUBLISHED[name].parser]


UNKNOWN = r"hermes, llama3_json, none or a target pkg\.mod:function"


@pytest.mark.parametrize(
    ("parser", "tokenizer", "parts"),
    [
        *(("auto", name, UNKNOWN) for name in ("mistral-v3", "deepseek-v3", "gemma-3", "glm-4")),
        ("herms", "plain", "'herms'.*'hermes'"),
        (f"{__name__}:digit", "plain", "'digits'"),
    ],
)
def test_an_unknown_parser_is_refused_with_the_valid_names(parser, tokenizer, parts):
    with pytest.raises(BadInput, match=parts) as refused:
        build_parser(parser, tokenizer_of(tokenizer))
    assert "\n" not in str(refused.value)


def test_a_response_template_reads_the_same_as_transformers():
    text = (
        "<think>So.</think>Yes.<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n</function>\n</tool_call>"
    )
    message = parse_response(text, XML, prefix="<|im_start|>assistant\n")
    assert parser_with_template(XML)(text) == ParsedTurn(
        message["content"], (Call("add", {"a": 3}),), {"thinking": "So."}
    )
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "add", "arguments": {"a": 3}}]


@pytest.mark.parametrize(("kind", "expected"), [("string", "3"), ("integer", 3)])
def test_a_response_template_converts_arguments_to_the_types_of_the_tool_schema(kind, expected):
    schema = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": kind}}}}
    template = json.loads(json.dumps(XML))
    del template["fields"]["tool_calls"]["content_args"]["value_parser"]
    parse = parser_with_template(template, tools=[{"type": "function", "function": schema}])
    text = "<tool_call>\n<function=add>\n<parameter=a>3</parameter>\n</tool_call>"
    assert parse(text).calls == (Call("add", {"a": expected}),)


def test_text_that_a_response_template_cannot_parse_is_a_call_with_an_error():
    parsed = parser_with_template(JSON_REGION)("a<tool_call>{</tool_call>")
    assert parsed.text == "a<tool_call>{</tool_call>"
    assert [re.search("json parser.* JSON", call.error) is None for call in parsed.calls] == [False]


@pytest.mark.smoke
@pytest.mark.system
def test_a_response_template_that_takes_too_long_is_stopped():
    """Three adjacent runs of white space in its pattern take time that is cubic in the length of the text."""
    text = "<tool_call><function=add><parameter=a>" + "\n" * 20000 + "</tool_call>"
    [call] = parser_with_template(XML)(text).calls
    assert f"more than {CPU_SECONDS} s of CPU time" in call.error


# ---- parsers of users


def digits(text):
    return ParsedTurn(text, tuple(Call("digit", {"of": int(digit)}) for digit in re.findall(r"\d", text)))


def nothing(text):
    return None


def test_a_target_is_called_and_must_return_a_parsed_turn():
    parse = build_parser(f"{__name__}:digits", tokenizer_of("plain"))
    assert parse("4 and 2").calls == (Call("digit", {"of": 4}), Call("digit", {"of": 2}))
    with pytest.raises(ValueError, match=r"models\.text\.calls\.ParsedTurn.* None"):
        build_parser(f"{__name__}:nothing", tokenizer_of("plain"))("a")
