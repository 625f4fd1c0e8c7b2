"""Parsers that extract tool calls from the text of a policy's turn. Torch-free and pure.

A policy may generate any text, so parsers raise no exceptions. A call that cannot be parsed becomes a call with an
error message for the policy. All parsers receive the text of a turn with its special tokens, except the token that
ended the turn.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NoReturn

from pydantic import JsonValue
from transformers import PreTrainedTokenizerFast

from rheostat.infra.errors import BadInput
from rheostat.infra.plugins import check_function, find_target, nearest_name
from rheostat.models.text.chats import TemplateFailed, parse_response, render_chats
from rheostat.models.text.tokenizer import ToolSchema

_SPACE: Final = re.compile(r"\s*")
_BETWEEN_CALLS: Final = re.compile(r"[\s;]*")
_THOUGHT_END, _OPENING, _CLOSING, _PYTHON = "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>"
_LONGEST_NUMBER: Final = 400
"""Maximum number of digits of an integer in a tool call. The largest float64 has 309 digits before the decimal
point."""
_DEEPEST: Final = 32
"""Maximum nesting depth of lists and objects in a tool call. Reading arguments overflows the stack only at a much
greater depth."""


@dataclass(frozen=True, slots=True)
class Call:
    """Tool call that a policy generated in a turn."""

    name: str
    """Name of the tool, or an empty string if the call could not be parsed."""
    arguments: Mapping[str, JsonValue]
    """Arguments of the tool by name. Empty if the call could not be parsed."""
    error: str = ""
    """Error message for the policy, or an empty string if the call is valid."""
    arguments_text: str = field(default="", compare=False, repr=False)
    """Arguments as the policy generated them if they are a JSON string instead of a JSON object. Otherwise an empty
    string."""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """Text and tool calls of one turn of the policy."""

    text: str
    """Text of the turn without its tool calls and without leading and trailing white space."""
    calls: tuple[Call, ...] = ()
    other_fields: Mapping[str, JsonValue] = field(default_factory=dict)
    """Further fields that the tokenizer's response template extracts from a turn, such as thoughts, keyed by their
    names in chat templates."""


def encode_call(name: str, arguments: Mapping[str, JsonValue], *, number: int = 0) -> dict[str, object]:
    """Return a tool call in the format that most chat templates require. `number` is the index of the call within its
    turn."""
    return {"id": call_id(number), "type": "function", "function": {"name": name, "arguments": arguments}}


def call_id(number: int) -> str:
    """Return the ID of a tool call, given its index within its turn. The ID has nine characters, because Mistral's
    templates require this length."""
    return f"{number:09d}"


Parser = Callable[[str], ParsedTurn]
"""Function that splits the text of a policy's turn into plain text and tool calls."""


def build_parser(name: str, tokenizer: PreTrainedTokenizerFast, *, tools: Sequence[ToolSchema] = ()) -> Parser:
    """Return the parser with this name: `hermes`, `llama3_json`, `none`, `auto`, or a target `pkg.mod:function` (a
    function that receives the text of a turn and returns a `ParsedTurn`). Raises BadInput if the name is unknown or
    `auto` finds no parser.

    `auto` uses the tokenizer's response template if the template extracts calls. Otherwise it uses the parser that can
    read a call as the chat template formats it.
    """
    if name == "auto":
        return _detect_parser(tokenizer, tools)
    if name in PARSERS:
        return PARSERS[name]
    if ":" in name:
        check_function(name, "text", where=f"parser {name!r}")
        return partial(_parse_by_target, name)
    raise BadInput(
        f"rollout.environment.parser is {name!r}, but it must be auto, {_NAMES}{nearest_name(name, ['auto', *PARSERS])}"
    )


# ---- formats
def keep_text(text: str) -> ParsedTurn:
    """Return a turn with its text unchanged and without tool calls, for environments that interpret the text
    themselves."""
    return ParsedTurn(text)


def hermes(text: str) -> ParsedTurn:
    """Parse any number of `<tool_call>{"name": …, "arguments": {…}}</tool_call>` after the thoughts of the turn.

    >>> hermes('Let me see.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ParsedTurn(text='Let me see.', calls=(Call(name='add', arguments={'a': 1}, error=''),), other_fields={})
    """
    at = _find_end_of_thoughts(text, _OPENING)
    texts: list[str] = [text[:at]]
    calls: list[Call] = []
    while (begin := text.find(_OPENING, at)) >= 0:
        texts.append(text[at:begin])
        call, at = _parse_hermes_call(text, begin + len(_OPENING))
        calls.append(call)
    return ParsedTurn("".join([*texts, text[at:]]).strip(), tuple(calls))


def _parse_hermes_call(text: str, begin: int) -> tuple[Call, int]:
    """Parse the tool call at index `begin` of the text, and return the call and the index after its end."""
    try:
        value, stop = _decode_json(text, begin)
    except ValueError as error:
        end = text.find(_CLOSING, begin)
        return _call_with_error(f"between {_OPENING} and {_CLOSING}: {error}"), end + len(
            _CLOSING
        ) if end >= 0 else len(text)
    end = _skip_pattern(_SPACE, text, stop)
    if not text.startswith(_CLOSING, end):
        return _call_with_error(f"expected {_CLOSING} after the call's JSON object, found {_excerpt(text, end)}"), stop
    return _build_call(value, ("arguments",)), end + len(_CLOSING)


def llama3_json(text: str) -> ParsedTurn:
    """Parse tool calls in Llama 3's format, `{"name": …, "parameters": {…}}`, either as the whole turn or after
    `<|python_tag|>`. Several calls are separated by `;`."""
    begin = _find_end_of_thoughts(text, _PYTHON)
    is_object = text.startswith("{", _skip_pattern(_SPACE, text, begin))
    at = text.find(_PYTHON, _find_end_of_value(text, begin) if is_object else begin)
    if at >= 0:
        begin, at = at, at + len(_PYTHON)
    elif is_object and re.search(r'"(name|parameters)"', text[begin:]):
        at = begin
    else:
        return ParsedTurn(text.strip())
    calls: list[Call] = []
    while not calls or text.startswith("{", at):
        try:
            value, stop = _decode_json(text, at)
        except ValueError as error:
            calls.append(_call_with_error(str(error)))
            at = len(text)
            break
        calls.append(_build_call(value, ("parameters", "arguments")))
        at = _skip_pattern(_BETWEEN_CALLS, text, stop)
    return ParsedTurn((text[:begin] + text[at:]).strip(), tuple(calls))


PARSERS: Final[Mapping[str, Parser]] = {"hermes": hermes, "llama3_json": llama3_json, "none": keep_text}
_NAMES: Final = f"{', '.join(PARSERS)} or a target pkg.mod:function"


# ---- JSON of policies
def _build_call(value: JsonValue, keys: Sequence[str]) -> Call:
    """Build a tool call from its decoded JSON. The arguments are read from the first of `keys` that is present. If the
    JSON does not describe a call, the returned call has an error message."""
    expected = f'expected {{"name": …, "{keys[0]}": {{…}}}}'
    if not isinstance(value, dict):
        return _call_with_error(f"{expected}, found {json.dumps(value):.40}")
    name, arguments = value.get("name"), next((value[key] for key in keys if key in value), None)
    if not isinstance(name, str) or not name:
        return _call_with_error(f"{expected}, found no name")
    if not _is_shallow(value, _DEEPEST):
        return _call_with_error(f"{expected}, found one that is nested more than {_DEEPEST} deep")
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return _call_with_error(f"{expected}, found a string or number in it that UTF-8 or JSON cannot spell")
    if not isinstance(arguments, dict):
        text = arguments if isinstance(arguments, str) else ""
        return Call(name, {}, f"{expected}, found no object of {keys[0]}", text)
    return Call(name, arguments)


def decode_arguments(call: Call) -> Call:
    """Return a tool call with its arguments decoded if they are a JSON string that contains an object, as in OpenAI's
    format. Other calls are returned unchanged."""
    if not call.arguments_text.lstrip().startswith("{"):
        return call
    try:
        arguments, end = _decode_json(call.arguments_text, 0)
    except ValueError:
        return call
    if call.arguments_text[end:].strip():
        return call
    return _build_call({"name": call.name, "arguments": arguments}, ("arguments",))


def _is_shallow(value: JsonValue, levels: int) -> bool:
    """Return whether a value has at most `levels` levels of nested lists and objects."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels >= 0 and all(_is_shallow(each, levels - 1) for each in inner)


def _call_with_error(error: str) -> Call:
    """Return a call that stands for a tool call that could not be parsed, with an error message for the policy."""
    return Call("", {}, error)


def _decode_json(text: str, begin: int) -> tuple[JsonValue, int]:
    """Decode the JSON value at `begin`, skipping leading white space, and return the value and the index after it.

    Raises ValueError if there is no valid JSON value.
    """
    try:
        value, end = _DECODER.raw_decode(text, _skip_pattern(_SPACE, text, begin))
    except json.JSONDecodeError as error:
        raise ValueError(f"expected a JSON object, found {_excerpt(text, error.pos)}: {error.msg}") from error
    except RecursionError as error:
        raise ValueError("expected a JSON object, found one that is nested too deeply") from error
    return value, end


def _parse_integer(digits: str) -> int:
    """Parse an integer in the JSON of a tool call. Raises ValueError if it has more than `_LONGEST_NUMBER` digits."""
    return int(digits) if len(digits) <= _LONGEST_NUMBER else _refuse_number(digits)


def _parse_float(digits: str) -> float:
    """Parse a floating-point number in the JSON of a tool call. Raises ValueError if it is not finite."""
    value = float(digits)
    return value if math.isfinite(value) else _refuse_number(digits)


def _refuse_number(digits: str) -> NoReturn:
    """Raise ValueError for a number that JSON does not allow, such as NaN, or that is too long."""
    raise ValueError(f"expected a number that JSON knows, found {digits:.20}")


_DECODER: Final = json.JSONDecoder(parse_int=_parse_integer, parse_float=_parse_float, parse_constant=_refuse_number)


def _find_end_of_thoughts(text: str, opening: str) -> int:
    """Return the index in a turn after its thoughts: after the first `</think>` outside the JSON of a tool call, or 0
    if there are no thoughts. `opening` is the text with which a tool call begins."""
    at = _find_end_of_value(text, 0) if text.lstrip().startswith("{") else 0
    while (end := text.find(_THOUGHT_END, at)) >= 0:
        while at <= end:
            begin = text.find(opening, at, end)
            if begin < 0:
                return end + len(_THOUGHT_END)
            at = _find_end_of_value(text, begin + len(opening))
    return 0


def _find_end_of_value(text: str, begin: int) -> int:
    """Return the index after the JSON value at `begin`, or `begin` if there is no JSON value."""
    try:
        return _decode_json(text, begin)[1]
    except ValueError:
        return begin


def _skip_pattern(pattern: re.Pattern[str], text: str, begin: int) -> int:
    """Return the index after the match of a pattern at `begin`. The pattern must be one that also matches an empty
    string."""
    match = pattern.match(text, begin)
    assert match is not None, "the pattern matches the empty string"
    return match.end()


def _excerpt(text: str, begin: int) -> str:
    """Return a short excerpt of the text from index `begin`, for an error message."""
    return repr(text[begin : begin + 20]) if begin < len(text) else "the end"


# ---- a tokenizer's own format
def _detect_parser(tokenizer: PreTrainedTokenizerFast, tools: Sequence[ToolSchema]) -> Parser:
    """Return the parser that `auto` selects for a tokenizer. Raises BadInput if the chat template fails or no parser
    can read the tool calls that it renders."""
    prompt: dict[str, object] = {"role": "user", "content": "Hello."}
    try:
        [prefix] = render_chats([[prompt]], tokenizer, generation_prompt=True, tools=tools)
        if "tool_calls" in ((tokenizer.response_template or {}).get("fields") or {}):
            return partial(_parse_by_template, tokenizer, prefix=prefix, tools=tools)
        call = Call("find", {"a": "b"})
        turn = {"role": "assistant", "content": "", "tool_calls": [encode_call(call.name, call.arguments)]}
        named = tools if isinstance(tokenizer.chat_template, dict) else ()  # one of its templates is for tools
        [chat] = render_chats([[prompt, turn]], tokenizer, generation_prompt=False, tools=named)
        [before] = render_chats([[prompt]], tokenizer, generation_prompt=True, tools=named)
    except TemplateFailed as error:
        raise BadInput(
            f"rollout.environment.parser = 'auto' chooses the parser by the policy's chat template, which {error}. "
            f"Set the parser to {_NAMES}."
        ) from error
    for parser in PARSERS.values():
        if parser(chat.removeprefix(before)).calls == (call,):
            return parser
    raise BadInput(
        "rollout.environment.parser = 'auto' found no parser for the policy's tool calls: the tokenizer has no "
        "response template for tool calls, and the chat template writes them in an unknown format. Set the parser to "
        f"{_NAMES}."
    )


def _parse_by_template(
    tokenizer: PreTrainedTokenizerFast, text: str, *, prefix: str, tools: Sequence[ToolSchema]
) -> ParsedTurn:
    """Parse a turn with the tokenizer's response template. `prefix` is the chat rendered before the turn. If the
    template fails, the returned turn contains one call with an error message."""
    try:
        message = parse_response(text, tokenizer, prefix=prefix, tools=tools)
    except TemplateFailed as error:
        reason = next(iter(str(error).splitlines()))
        return ParsedTurn(text.strip(), (_call_with_error(f"the parser of calls {reason:.200}"),))
    content, tool_calls = message.get("content"), message.get("tool_calls") or []
    calls = tool_calls if isinstance(tool_calls, list) else [tool_calls]
    functions = [call.get("function", call) if isinstance(call, dict) else call for call in calls]
    other_fields = {name: value for name, value in message.items() if name not in ("role", "content", "tool_calls")}
    return ParsedTurn(
        content if isinstance(content, str) else "",
        tuple(_build_call(each, ("arguments",)) for each in functions),
        other_fields,
    )


def _parse_by_target(target: str, text: str) -> ParsedTurn:
    """Parse a turn with a user-defined function. Raises ValueError if the function does not return a `ParsedTurn`."""
    parse = find_target(target, where=f"parser {target!r}")
    assert callable(parse), "checked"
    parsed = parse(text)
    if not isinstance(parsed, ParsedTurn):
        raise ValueError(
            f"the parser {target!r} must return a rheostat.models.text.calls.ParsedTurn, but it returned {parsed!r:.80}"
        )
    return parsed
