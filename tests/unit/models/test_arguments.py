"""Arguments of tool calls are compared with the tool's schema, and the policy reads which argument is wrong."""

from enum import Enum
from typing import Literal

import pytest

from rheostat.infra.episode_runner import build_schemas
from rheostat.infra.errors import BadInput
from rheostat.models.text.arguments import check_arguments, check_schemas
from rheostat.models.text.calls import Call, ParsedTurn, hermes


class Unit(Enum):
    CELSIUS = "C"
    FAHRENHEIT = "F"


def add(a: int, b: int = 0) -> int:
    """Add two numbers.

    Args:
        a: first
        b: second
    """
    return a + b


def measure(place: str | None, unit: Unit, tags: list[str], options: dict, share: float | int = 0):
    return place, unit, tags, options, share


def untyped(value):
    return value


def keywords(value: int, **others: int):
    return value, others


SCHEMAS = build_schemas([add, measure, untyped, keywords], skip_unknown=True)
SERVER = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "",
            "parameters": {
                "type": "object",
                "properties": {
                    "page": {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]},
                    "item": {"$ref": "#/$defs/Item"},
                },
                "$defs": {"Item": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}},
            },
        },
    },
    {"function": {"name": "remote", "parameters": {"properties": {"a": {"$ref": "http://127.0.0.1:9/schema"}}}}},
    {"function": {"name": "invalid", "parameters": {"type": 3}}},
    {"function": {"name": "plain"}},
    {
        "name": "named",
        "parameters": {
            "properties": {
                "enum": {"type": "integer", "nullable": True},
                "type": {"type": "string"},
                "share": {"type": "number", "multipleOf": 0.1},
            }
        },
    },
    {"function": {"name": "open", "parameters": {"properties": {}, "additionalProperties": {"type": "integer"}}}},
]


def error_of(name, arguments):
    """Return the error of a call after the check, and verify that the check keeps its arguments."""
    parse = check_arguments(lambda text: ParsedTurn(text, (Call(name, arguments),)), [*SCHEMAS, *SERVER])
    [call] = parse("").calls
    assert (call.name, call.arguments) == (name, arguments)
    return call.error


RIGHT = {"place": None, "unit": "C", "tags": [], "options": {}}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("add", {"a": 1}),
        ("measure", RIGHT),
        ("measure", {**RIGHT, "place": "sea", "tags": ["x"], "share": 0.5}),
        ("untyped", {"anything": 1}),
        ("keywords", {"value": 1, "other": 2}),
        ("find", {"page": None}),
        ("remote", {"a": 1}),
        ("invalid", {"a": 1}),
        ("plain", {"a": 1}),
        ("open", {"a": 1}),
        ("named", {"enum": None, "type": "x"}),
        ("unknown tool", {"a": 1}),
    ],
)
def test_arguments_that_the_schema_allows_pass(name, arguments):
    assert error_of(name, arguments) == ""


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("add", {"a": "one"}, 'add: a: expected integer, found "one"'),
        ("add", {"a": True}, "add: a: expected integer, found true"),
        ("add", {"a": 1.0}, "add: a: expected integer, found 1.0"),
        ("add", {"a": None}, "add: a: expected integer, found null"),
        ("add", {}, "add: a: expected integer, found nothing"),
        ("add", {"a": 1, "bb": 2}, "add: bb: no such argument, did you mean 'b'?"),
        ("add", {"a": 1, "zone": 2}, "add: zone: no such argument; expected a, b"),
        ("measure", {**RIGHT, "place": 3}, "measure: place: expected string or null, found 3"),
        ("measure", {**RIGHT, "unit": "K"}, 'measure: unit: expected one of "C", "F", found "K"'),
        ("measure", {**RIGHT, "tags": ["x", 1]}, "measure: tags[1]: expected string, found 1"),
        ("measure", {**RIGHT, "share": "all"}, 'measure: share: expected integer or number, found "all"'),
        (
            "measure",
            {"options": []},
            "measure: options: expected object, found []; place: expected string or null, found nothing; unit: "
            "expected string, found nothing; 1 more",
        ),
        ("find", {"page": "two"}, 'find: page: expected integer or null, found "two"'),
        ("find", {"page": 0}, "find: page: 0 is less than the minimum of 1"),
        ("find", {"item": {}}, "find: item.name: expected string, found nothing"),
        ("find", {"pages": 1}, "find: pages: no such argument, did you mean 'page'?"),
        ("open", {"a": "x"}, 'open: a: expected integer, found "x"'),
        ("named", {"enum": "x"}, 'named: enum: expected integer or null, found "x"'),
        ("named", {"share": 10**400}, "named: arguments: a number is too large"),
        ("add", {"a": 1, "x" * 1000: 2}, f"add: {'x' * 200}: no such argument; expected a, b"),
        ("add", {"a": "x" * 1000}, f'add: a: expected integer, found "{"x" * 59}'),
    ],
)
def test_the_policy_reads_which_argument_is_wrong(name, arguments, error):
    assert error_of(name, arguments) == error


@pytest.mark.parametrize(
    ("parameters", "fault"),
    [
        ({"type": 3}, r"parameters\.type: 3 "),
        ([], r"parameters: expected an object, found \[\]"),
        ({"properties": {"a": {"type": "string", "minLength": "x"}}}, r"parameters\.properties\.a\.minLength: 'x'"),
        ({"properties": {"a": {"enum": 3}}}, r"parameters\.properties\.a\.enum: 3"),
        ({"required": "a"}, r"parameters\.required: 'a'"),
        ({"properties": {"a": {"$ref": "http://127.0.0.1:9/s"}}}, r"a\.\$ref: 'http://127\.0\.0\.1:9/s' is no part"),
        ({"properties": {"a": {"$ref": "#/$defs/B"}}, "$defs": {}}, r"a\.\$ref: '#/\$defs/B' is no part"),
        ({"properties": {"a": {"pattern": "("}}}, r"a\.pattern: '\(' is not a 'regex'"),
    ],
)
def test_an_invalid_schema_of_a_tool_is_refused_with_its_place(parameters, fault):
    tools = [*SCHEMAS, {"function": {"name": "broken", "parameters": parameters}}]
    with pytest.raises(BadInput, match=rf"^here: the schema of tool 'broken' is invalid: .*{fault}"):
        check_schemas(tools, where="here")


def test_schemas_with_local_references_and_data_that_look_like_keywords_are_accepted():
    data = {"properties": {"pattern": {"type": "string", "enum": ["("]}, "a": {"default": {"$ref": "x"}}}}
    check_schemas([*SCHEMAS, SERVER[0], *SERVER[3:], {"name": "data", "parameters": data}], where="here")


@pytest.mark.parametrize("arguments", [r'"{\"a\": 2}"', r'" {\"a\": 2}\n"', '{"a": 2}'])
def test_arguments_as_a_json_text_are_decoded(arguments):
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    assert check_arguments(hermes, SCHEMAS)(text).calls == (Call("add", {"a": 2}),)


@pytest.mark.parametrize(
    "arguments", ['"two"', r'"{\"a\": 2"', r'"{\"a\": 2} and"', r'"[2]"', r'"{\"a\": \"\\ud83d\"}"', '""', "null"]
)
def test_other_texts_in_place_of_arguments_are_reported(arguments):
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    [call] = check_arguments(hermes, SCHEMAS)(text).calls
    assert call.error.startswith("expected")
    assert not call.arguments


def count_words(text: str, *, limit: int | None = None, units: Literal["words", "letters"] = "words"): ...


def test_the_schema_of_a_function_without_a_docstring_follows_from_its_type_hints():
    [schema] = build_schemas([count_words], skip_unknown=True)
    properties = {
        "text": {"type": "string"},
        "limit": {"type": "integer", "nullable": True},
        "units": {"type": "string", "enum": ["words", "letters"]},
    }
    assert schema["function"]["parameters"] == {"type": "object", "properties": properties, "required": ["text"]}
    assert build_schemas([lambda text: text, count_words], skip_unknown=True) == [schema]
