"""Calls in what a policy wrote: read as they are meant, refused in words for it, and never an exception."""

import json
import re
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_parsing import parse_response

from infra.errors import BadInput
from models.text.calls import PARSERS, Call, ParsedTurn, hermes, llama3_json, parser_of, unparsed
from models.text.chats import CPU_SECONDS
from tests.support.chat_templates import PUBLISHED, tokenizer_of

ADD = {"name": "add", "arguments": {"a": 1, "b": [2, {"c": None}]}}
XML = {  # as Qwen 3.5 and its kin write calls
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close_pattern": r"</think>\s*"},
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>",
                "value_parser": {"name": "json", "args": {"allow_non_json": True}},
            },
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*"},
    },
}
JSON_REGION = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {},
    },
}


def with_response_template(template, *, tools=()):
    """The parser of a tokenizer that has this one."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of("qwen-2.5").backend_tokenizer,
        chat_template=PUBLISHED["qwen-2.5"].template,
        response_template=template,
    )
    return parser_of("auto", tokenizer, tools=tools)


# ---- what is meant
def test_hermes_reads_several_calls_and_the_text_beside_them():
    text = f"One.<tool_call>\n{json.dumps(ADD)}\n</tool_call> Two. <tool_call>{json.dumps(ADD)}</tool_call>\n"
    assert hermes(text) == ParsedTurn("One. Two.", (Call(**ADD), Call(**ADD)))


def test_a_call_that_is_quoted_in_thoughts_or_arguments_is_none():
    call = {"name": "say", "arguments": {"text": "<tool_call>{}</tool_call>"}}
    text = f"<think>I may write <tool_call>{{}}</tool_call>.</think><tool_call>{json.dumps(call)}</tool_call>"
    parsed = hermes(text)
    assert parsed.calls == (Call(**call),)
    assert parsed.text == "<think>I may write <tool_call>{}</tool_call>.</think>"


@pytest.mark.parametrize("before", ["", "\n ", "<|python_tag|>", "<think>Hm {}.</think>\n"])
def test_llama3_json_reads_a_turn_that_is_a_call(before):
    written = '{"name": "add", "parameters": {"a": 1, "b": [2, {"c": null}]}}'
    assert llama3_json(before + written).calls == (Call(**ADD),)
    assert llama3_json(f"{before}{written}; {written}\n").calls == (Call(**ADD), Call(**ADD))


@pytest.mark.parametrize("text", ["It is 4.", '{"answer": 4}', "So {x | x > 0}", "{", ""])
def test_llama3_json_leaves_other_text_alone(text):
    assert llama3_json(text) == ParsedTurn(text)


def test_none_reads_nothing():
    text = ' <tool_call>{"name": "a", "arguments": {}}</tool_call>'
    assert unparsed(text) == ParsedTurn(text)


# ---- what is wrong
@pytest.mark.parametrize(
    ("body", "error"),
    [
        ('{"name": "add", "arguments": {"a": 1}', "found '</tool_call> <tool_c': Expecting ',' delimiter$"),
        ('{"name": "add"}', r'expected {"name": …, "arguments": {…}}, found no object of arguments'),
        ('{"name": "add", "arguments": "{}"}', "found no object of arguments"),
        ('{"name": 3, "arguments": {}}', "found no name"),
        ('["add"]', r'found \["add"\]'),
        ("add(1, 2)", r"expected a JSON object, found 'add\(1, 2\)"),
        ('{"name": "add", "arguments": {"a": 1e999}}', "a number that JSON knows, found 1e999"),
        ('{"name": "add", "arguments": {"a": NaN}}', "a number that JSON knows, found NaN"),
        ('{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}", "found 99999999999999999999$"),
        ('{"name": "add", "arguments": {"a": "\\ud800"}}', "UTF-8 or JSON cannot spell"),
        ('{"name": "add", "arguments": {"a": ' + "[" * 40 + "]" * 40 + "}}", "nested more than 32 deep"),
        ("[" * 100000, "nested too deeply"),
        ("", "found '</tool_call> <tool_c': Expecting value$"),
    ],
)
def test_a_malformed_call_says_what_is_wrong_with_it(body, error):
    [call, after] = hermes(
        f'<tool_call>{body}</tool_call> <tool_call>{{"name": "b", "arguments": {{}}}}</tool_call>'
    ).calls
    assert re.search(error, call.error)
    assert "\n" not in call.error and len(call.error) < 200
    assert call.arguments == {}
    assert after == Call("b", {})


def test_a_call_without_its_end_is_malformed():
    [call] = hermes('<tool_call>{"name": "a", "arguments": {}}').calls
    assert call.error == "expected </tool_call> after the call's JSON object, found the end"


def test_a_call_after_the_python_tag_is_one_even_if_it_is_no_json():
    [call] = llama3_json('<|python_tag|>search.call(query="a")').calls
    assert call.error == "expected a JSON object, found 'search.call(query=\"a': Expecting value"


# ---- whatever a policy writes
PIECES = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "</think>", "<think>", '{"name": "a", "arguments": {}}'),
    *('{"name": "a", "parameters": {"b": ', "{", "}", "[", "]", '"', "\\", "\\u12", ",", ":", ";", "1e999", "NaN", "-"),
    *('"name"', "\n", " ", "é", "\x00", "\u2028", "😀", "1" * 5000, "<function=a>", "<parameter=b>", "</parameter>"),
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=25).map("".join) | st.text(max_size=60)


def check(parsed, text):
    for call in parsed.calls:
        assert bool(call.error) or bool(call.name)
        assert not (call.error and call.arguments)
        assert json.loads(json.dumps(call.arguments, allow_nan=False)) == call.arguments
        call.error.encode()
    assert len(parsed.text) <= len(text)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(PARSERS)), TEXTS)
@example("hermes", "<tool_call>")
@example("llama3_json", '{"name":')
def test_no_text_makes_a_parser_raise(name, text):
    check(PARSERS[name](text), text)


@settings(max_examples=80, deadline=None)
@given(TEXTS)
def test_no_text_makes_a_response_template_raise(text):
    for template in (XML, JSON_REGION):
        check(with_response_template(template)(text), text)


@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.dictionaries(st.text(max_size=5), st.sampled_from(PIECES) | st.text(max_size=9), max_size=3),
)
@example("", {"a": "</think>"})
@example("I think.", {"a": "<tool_call></think>", "b": "</think></tool_call>"})
def test_a_call_that_is_written_is_read(said, arguments):
    said = said.replace("<", "").replace("{", "")
    try:
        json.dumps(arguments, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return
    for ascii_only in (True, False):
        written = json.dumps({"name": "find", "arguments": arguments}, ensure_ascii=ascii_only)
        expected = (Call("find", arguments),)
        assert hermes(f"{said}<tool_call>{written}</tool_call>") == ParsedTurn(said.strip(), expected)
        assert llama3_json(f"{said}<|python_tag|>{written}") == ParsedTurn(said.strip(), expected)
        assert llama3_json(written) == ParsedTurn("", expected)


@pytest.mark.parametrize(
    "unit",
    [*PIECES, "<tool_call>{", '<tool_call>"', '<tool_call>["</tool_call>",', '{"name": ', "<|python_tag|>{"],
)
def test_the_time_that_a_parser_takes_grows_with_the_text_alone(unit):
    """A hundred times the text takes a hundred times as long, not ten thousand times: seconds tell them apart."""
    for parse in (hermes, llama3_json):
        started = time.process_time()
        parse(unit * (200_000 // len(unit)))
        parse(unit * (200_000 // len(unit)) + "</think>")
        assert time.process_time() - started < 5


# ---- a tokenizer's own format
@pytest.mark.parametrize("name", sorted(name for name, known in PUBLISHED.items() if known.parser))
def test_a_parser_is_found_by_how_the_chat_template_writes_a_call(name):
    assert parser_of("auto", tokenizer_of(name)) is PARSERS[PUBLISHED[name].parser]


@pytest.mark.parametrize("name", ["mistral-v3", "deepseek-v3", "gemma-3", "glm-4"])
def test_a_chat_template_in_none_of_the_formats_is_refused_with_the_names_of_parsers(name):
    with pytest.raises(BadInput, match=r"name hermes, llama3_json, none or a target pkg\.mod:function") as refused:
        parser_of("auto", tokenizer_of(name))
    assert "\n" not in str(refused.value)


def test_a_parser_that_there_is_not_is_refused_with_the_nearest():
    with pytest.raises(BadInput, match="did you mean 'hermes'"):
        parser_of("herms", tokenizer_of("plain"))


def test_a_response_template_reads_what_transformers_reads_with_it():
    text = (
        "<think>So.</think>Yes.<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n</function>\n</tool_call>"
    )
    parsed = with_response_template(XML)(text)
    message = parse_response(text, XML, prefix="<|im_start|>assistant\n")
    assert parsed == ParsedTurn(message["content"], (Call("add", {"a": 3}),), {"thinking": "So."})
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "add", "arguments": {"a": 3}}]


def test_a_response_template_gives_arguments_the_types_of_the_tools_schema():
    schema = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
    template = json.loads(json.dumps(XML))
    template["fields"]["tool_calls"]["content_args"].pop("value_parser")
    text = "<tool_call>\n<function=add>\n<parameter=a>3</parameter>\n</tool_call>"
    for kind, expected in (("string", "3"), ("integer", 3)):
        schema["parameters"]["properties"]["a"]["type"] = kind
        parse = with_response_template(template, tools=[{"type": "function", "function": schema}])
        assert parse(text).calls == (Call("add", {"a": expected}),)


def test_what_a_response_template_refuses_is_a_call_with_an_error():
    parsed = with_response_template(JSON_REGION)("a<tool_call>{</tool_call>")
    assert parsed.text == "a<tool_call>{</tool_call>"
    assert [call.error for call in parsed.calls] == [
        "the parser of calls refuses it: json parser could not parse region as JSON."
    ]


def test_a_response_template_that_does_not_end_is_ended():
    """Its three runs of white space in a row take the cube of a text's length."""
    text = "<tool_call><function=add><parameter=a>" + "\n" * 20000 + "</tool_call>"
    [call] = with_response_template(XML)(text).calls
    assert call.error == f"the parser of calls does not end: it took more than {CPU_SECONDS} s of CPU time"


# ---- a parser of the user's own
def digits(text):
    return ParsedTurn(text, tuple(Call("digit", {"of": int(found)}) for found in re.findall(r"\d", text)))


def nothing(text):
    return None


def test_a_target_reads_calls_of_its_own():
    parse = parser_of(f"{__name__}:digits", tokenizer_of("plain"))
    assert parse("4 and 2").calls == (Call("digit", {"of": 4}), Call("digit", {"of": 2}))


def test_a_target_that_is_no_parser_is_refused():
    with pytest.raises(BadInput, match="did you mean 'digits'"):
        parser_of(f"{__name__}:digit", tokenizer_of("plain"))
    with pytest.raises(ValueError, match=r"expected models\.text\.calls\.ParsedTurn, found None"):
        parser_of(f"{__name__}:nothing", tokenizer_of("plain"))("a")
