"""Chats in the rows of data files: their messages, and the tools and variables that the chat template receives.

In this module, `place` and `column` say where a value comes from, as error messages name it.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from math import isnan
from typing import Final, cast

from pydantic import JsonValue

from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput
from rheostat.infra.plugins import nearest_name
from rheostat.models.config.chat_files import RESERVED_KWARGS, ChatColumns, ChatFile, MessageFields
from rheostat.models.data.dropping import EmptyRow
from rheostat.models.data.json_rows import decode_text
from rheostat.models.data.problems import (
    NO_ARGUMENTS,
    Content,
    ImagePlace,
    Message,
    Prompt,
    TemplateArguments,
    check_columns,
    count_image_places,
)
from rheostat.models.data.sharegpt import convert_turns, is_sharegpt_turn

_TEXT_FIELDS: Final = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking", "tool_plan")
FIELDS: Final = ("role", "content", "tool_calls", *_TEXT_FIELDS)
"""Fields that a message of a chat can have. These are the fields that published chat templates use."""
_THOUGHTS: Final = ("tool_calls", "reasoning_content", "reasoning", "thinking", "tool_plan")
"""Fields that make a message of the assistant valid although it has no content."""
_OPTIONAL_CONTENT: Final = ("system", "developer", "tool")
"""Roles whose messages may have an empty content. An empty system message keeps a template from inserting its default
one."""
_CALL, _FUNCTION = ("id", "type", "index", "function"), ("name", "arguments")
_TEXT_PARTS: Final = ("text", "input_text", "output_text")
"""Types of content parts that contain text: that of chat templates, and those of OpenAI's Responses API."""
_WAY_OUT: Final = "Rename or remove the field, or set message_fields = 'drop' to read only role and content."


def omit_nulls(value: object) -> object:
    """Return a value without null fields, at every depth. Parquet and Arrow give every struct of a column the same
    fields, and store null for fields that a row does not have."""
    match value:
        case dict():
            return {name: omit_nulls(part) for name, part in value.items() if part is not None}
        case list():
            return [omit_nulls(part) for part in value]
        case _:
            return value


def read_prompt(
    place: str,
    row: Mapping[str, object],
    file: ChatFile,
    *,
    is_table: bool,
    is_chat: bool = False,
    image_mark: str = "",
) -> tuple[Prompt, TemplateArguments]:
    """Return the prompt of a row, and the arguments with which a chat template renders it. `place` names the row in
    messages.

    A prompt is plain text, or a chat whose last message is not from the assistant. `is_table` is set if the row comes
    from a Parquet or Arrow file, `is_chat` if plain text becomes a chat later. `image_mark` is the placeholder of an
    image in the messages of a chat. Raises BadInput if a value is invalid.
    """
    values = {name: omit_nulls(row.get(name)) for name in file.chat_columns} if is_table else row
    prompt = _read_prompt_value(place, values[file.prompt_column], file, image_mark)
    if isinstance(prompt, str):
        return prompt, read_arguments(place, values, file) if is_chat else NO_ARGUMENTS
    return add_system_column(place, prompt, values, file), read_arguments(place, values, file)


def add_system_column(
    place: str, messages: tuple[Message, ...], values: Mapping[str, object], columns: ChatColumns
) -> tuple[Message, ...]:
    """Return a chat with the system message that the row has in `system_column` added at the start. Unchanged if the
    column is missing or empty. Raises BadInput if the chat has another system message."""
    column = columns.system_column or ""
    value = values.get(column)
    if is_missing(value) or not (text := _read_any_text(place, value, column)).strip():
        return messages
    if messages and messages[0].role in ("system", "developer"):
        if messages[0].text.strip() == text.strip():
            return messages
        raise BadInput(
            f"{place}: {column}: the row has the system message {text!r:.40} in this column, and another one at the "
            'start of the chat. Remove one of them, or set system_column = "" to ignore the column.'
        )
    return (Message("system", text), *messages)


def read_arguments(place: str, values: Mapping[str, object], columns: ChatColumns) -> TemplateArguments:
    """Return the tools and variables that the chat template receives for a row. Raises BadInput if they are invalid."""
    tools, kwargs = columns.tools_column, columns.chat_template_kwargs_column
    own = read_kwargs(place, values.get(kwargs), kwargs) if kwargs else {}
    return TemplateArguments(
        tools=read_tools(place, values.get(tools), tools) if tools else (),
        kwargs={**columns.chat_template_kwargs, **own},
    )


def _read_prompt_value(place: str, prompt: object, file: ChatFile, image_mark: str) -> Prompt:
    """Return the value of a prompt column: plain text, or the messages of a chat, in which images replace
    each `image_mark`. Raises BadInput for other values."""
    column = file.prompt_column
    if not isinstance(prompt, list):
        return read_text(place, prompt, column)
    messages = read_messages(place, prompt, column, fields=file.message_fields, image_mark=image_mark)
    if not messages or messages[-1].role == "assistant":
        fault = (
            "the chat has no messages. Add a message, or remove the row"
            if not messages
            else "its last message is by the assistant. Move that message to the answer column, or remove it"
        )
        kind = BadInput if messages else EmptyRow
        raise kind(
            f"{place}: {column}: a prompt must be a chat whose last message is not by the assistant, because the "
            f"policy generates the next message, but {fault}."
        )
    return messages


def read_messages(
    place: str, turns: Sequence[object], column: str, *, fields: MessageFields = "keep", image_mark: str = ""
) -> tuple[Message, ...]:
    """Return the messages of a chat, given as objects in a column of a row. With `fields="drop"`, only role and content
    are read. In contents that are text, `image_mark` is replaced by an image, unless it is empty.

    Turns in the format of ShareGPT (`from` and `value`) are converted first. Raises BadInput, which names `place` and
    `column`, if a message lacks `role` or `content`, has an unknown field, or an invalid value.
    """
    read = _read_message if fields == "keep" else _read_plain_message
    messages = convert_turns(place, turns, column)
    if image_mark:
        messages = [_split_at_marks(turn, image_mark) for turn in messages]
    return tuple(read(place, turn, f"{column}[{index}]") for index, turn in enumerate(messages))


def _split_at_marks(turn: object, image_mark: str) -> object:
    """Return a message in which every mark in a content that is text is replaced by an image. The white space around
    marks is kept, except if there is no other text between two marks."""
    content = turn.get("content") if isinstance(turn, dict) else None
    if not isinstance(content, str) or image_mark not in content:
        return turn
    texts = content.split(image_mark)
    parts = [part for text in texts for part in ({"type": "image"}, {"type": "text", "text": text})][1:]
    return {
        **cast(dict[str, object], turn),
        "content": [part for part in parts if part.get("text", image_mark).strip()],
    }


def check_marks(turns: object, prompt: Prompt, images: int, image_mark: str, *, source: str) -> None:
    """Raise BadInput if a ShareGPT chat has images but no image marks, so that the places of the images are unknown.
    `turns` is the value in the row, and `source` names the row."""
    is_sharegpt = isinstance(turns, list) and any(map(is_sharegpt_turn, turns))
    if images and is_sharegpt and not count_image_places(prompt):
        raise BadInput(
            f"{source}: the row has {format_count(images, 'image')}, but its messages have no mark {image_mark}. Write "
            'one mark for each image, or set image_mark = "" to put the images before the first message of the user.'
        )


def _read_plain_message(place: str, turn: object, column: str) -> Message:
    """Return a message with only its role and content. Its other fields are ignored."""
    if not isinstance(turn, dict) or "role" not in turn or "content" not in turn:
        raise _describe_missing(place, turn, column)
    role = read_text(place, turn["role"], f"{column}.role")
    return Message(role, _read_content(place, turn["content"], f"{column}.content", fields="drop"))


def _read_message(place: str, turn: object, column: str) -> Message:
    """Return a message with all of its fields. A field that is null counts as absent, except `content`."""
    if not isinstance(turn, dict) or "role" not in turn:
        raise _describe_missing(place, turn, column)
    present = {name: value for name, value in turn.items() if value is not None and value != []}
    _require_known(place, present, column, FIELDS, what="a chat message")
    role = read_text(place, turn["role"], f"{column}.role")
    texts = {name: _read_any_text(place, present[name], f"{column}.{name}") for name in _TEXT_FIELDS if name in present}
    name = texts.pop("name", "")
    calls = _read_calls(place, present["tool_calls"], f"{column}.tool_calls") if "tool_calls" in present else []
    others = ({"tool_calls": calls} if calls else {}) | texts
    check_columns(others, source=f"{place}: {column}")
    if has_thoughts := role == "assistant" and any(map(others.get, _THOUGHTS)):
        if turn.get("content") is None:
            return Message(role, None, name, others)
    elif "content" not in turn:
        raise _describe_missing(place, turn, column)
    content = turn["content"]
    if has_thoughts or role in _OPTIONAL_CONTENT:
        if content == []:
            return Message(role, "", name, others)
        if isinstance(content, str) and not content.strip():
            return Message(role, _read_any_text(place, content, f"{column}.content"), name, others)
    return Message(role, _read_content(place, content, f"{column}.content", fields="keep"), name, others)


def _describe_missing(place: str, turn: object, column: str) -> BadInput:
    """Return the error for an object that is not a message, because it lacks role or content."""
    return BadInput(f"{place}: {column} is not a chat message. Expected {{role, content}}, found {turn!r:.80}")


def _require_known(place: str, value: Mapping[str, object], column: str, known: Collection[str], *, what: str) -> None:
    """Raise BadInput if an object has a field that is not in `known`. The message suggests the nearest known field and
    names the kind of object as `what`."""
    for name in value:
        if name not in known:
            raise BadInput(
                f"{place}: {column}.{name}: {what} has no field {name!r}{nearest_name(name, known) or '.'} "
                f"The fields are {', '.join(known)}. {_WAY_OUT}"
            )


def _read_calls(place: str, value: object, column: str) -> list[JsonValue]:
    """Return the tool calls of a message in OpenAI's format. The arguments of a call stay an object or JSON text, as
    they are in the file.

    Raises BadInput if a call has no name, an unknown field, or arguments that are not a JSON object.
    """
    calls = _parse_json(place, value, column)
    if not isinstance(calls, list):
        raise BadInput(
            f"{place}: {column}: the value must be a list of tool calls, found {value!r:.60}. Write it as a list, or "
            "remove it."
        )
    return [_read_call(place, call, f"{column}[{index}]") for index, call in enumerate(calls)]


def _read_call(place: str, value: object, column: str) -> JsonValue:
    """Return one tool call of a message, given as `{type, function: {name, arguments}}` or only as the inner object."""
    call = _parse_json(place, value, column)
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not function.get("name"):
        raise BadInput(
            f'{place}: {column}: expected a tool call {{"type": "function", "function": {{"name", "arguments"}}}}, '
            f"found {value!r:.80}"
        )
    read_text(place, function["name"], f"{column}.name")
    call, function = ({key: each for key, each in part.items() if each is not None} for part in (call, function))
    is_wrapped = "function" in call
    _require_known(place, function, column, _FUNCTION if is_wrapped else (*_CALL[:2], *_FUNCTION), what="a tool call")
    arguments = function.get("arguments", {})
    arguments = {} if isinstance(arguments, str) and not arguments.strip() else arguments
    parsed = _parse_json(place, arguments, f"{column}.arguments")
    if not isinstance(parsed, dict):
        raise BadInput(
            f"{place}: {column}.arguments: the arguments of a tool call must be a JSON object, found "
            f'{arguments!r:.60}. Write them as {{"name": value}}.'
        )
    check_columns({f"{column}.arguments": parsed}, source=place)
    function["arguments"] = arguments
    if not is_wrapped:
        return cast(JsonValue, function)
    _require_known(place, call, column, _CALL, what="a tool call")
    return cast(JsonValue, call | {"function": function})


def _parse_json(place: str, value: object, column: str) -> object:
    """Return the decoded value if `value` is JSON text, else `value` unchanged. Raises BadInput, which names `place`
    and `column`, for invalid JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadInput(
            f"{place}: {column}: the text must be valid JSON: {error}. Correct the text, or write the value as JSON "
            "instead of text."
        ) from error


def read_tools(place: str, value: object, column: str) -> tuple[Mapping[str, JsonValue], ...]:
    """Return the tools that a prompt describes to the policy, given as a list of JSON schemas or as JSON text. Empty
    for null or empty values.

    Raises BadInput, which names `place` and `column`, if an element is not the JSON schema of a function with a name.
    """
    tools = None if isinstance(value, str) and not value.strip() else _parse_json(place, value, column)
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise BadInput(
            f"{place}: {column}: the value must be a list of JSON schemas of tools, found {value!r:.60}. Write it as "
            "a list."
        )
    parsed = [_parse_json(place, tool, f"{column}[{index}]") for index, tool in enumerate(tools)]
    for index, tool in enumerate(parsed):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name.strip():
            raise BadInput(
                f'{place}: {column}[{index}]: expected a JSON schema {{"type": "function", "function": {{"name", '
                f'"description", "parameters"}}}}, found {tool!r:.80}'
            )
        check_columns({f"{column}[{index}]": cast(JsonValue, tool)}, source=place)
    return tuple(cast("list[Mapping[str, JsonValue]]", parsed))


def read_kwargs(place: str, value: object, column: str) -> dict[str, JsonValue]:
    """Return the variables that the chat template receives for a row, given as an object or as JSON text. Empty for
    null or empty values.

    Raises BadInput if the value is not an object, or contains a variable that Rheostat always sets.
    """
    kwargs = None if isinstance(value, str) and not value.strip() else _parse_json(place, value, column)
    if kwargs is None:
        return {}
    if not isinstance(kwargs, dict):
        raise BadInput(
            f"{place}: {column}: the value must be an object that maps variables of the chat template to values, "
            f"found {value!r:.60}. Write it as an object."
        )
    for name in RESERVED_KWARGS:
        if name in kwargs:
            raise BadInput(
                f"{place}: {column}.{name}: Rheostat always sets this variable of the chat template. Remove it from "
                "the column."
            )
    check_columns(kwargs, source=f"{place}: {column}")
    return kwargs


def _read_content(place: str, value: object, column: str, *, fields: MessageFields) -> Content:
    """Return the content of a message: text, or a list of texts and placeholders for images.

    Raises BadInput if the content is empty, has other parts, or (with `fields="keep"`) a part with unknown fields.
    """
    if not isinstance(value, list):
        return read_text(place, value, column)
    parts: list[str | ImagePlace] = []
    for index, part in enumerate(value):
        if fields == "keep" and isinstance(part, dict) and part.get("type") in ("image", *_TEXT_PARTS):
            present = {name: each for name, each in part.items() if each not in (None, "")}
            known = ("type",) if part["type"] == "image" else ("type", "text")
            _require_known(place, present, f"{column}[{index}]", known, what=f"a part of type {part['type']!r}")
        match part:
            case {"type": "image"}:
                parts.append(ImagePlace())
            case {"type": kind, "text": text} if kind in _TEXT_PARTS:
                parts.append(read_text(place, text, f"{column}[{index}].text"))
            case _:
                raise BadInput(
                    f'{place}: {column}[{index}]: expected {{type: "image"}} or {{type: "text", text}}, '
                    f"found {part!r:.80}"
                )
    if not parts:
        raise BadInput(
            f"{place}: {column}: the list of parts is empty, but a message needs at least one text or image. Add the "
            "text, or remove the row."
        )
    return tuple(parts)


def read_text(place: str, value: object, column: str) -> str:
    """Return a value that must be text with at least one visible character. Bytes are decoded as UTF-8.

    Raises BadInput, which names `place` and `column`, for other values and for text that UTF-8 cannot encode.
    """
    text = _read_any_text(place, value, column)
    if not text.strip():
        raise EmptyRow(
            f"{place}: {column}: the text is empty or contains only white space. Fill in the text, or remove the row."
        )
    return text


def _read_any_text(place: str, value: object, column: str) -> str:
    """Return a value that must be text, which may be blank. Bytes are decoded as UTF-8. Raises BadInput for other
    values."""
    if isinstance(value, bytes):
        value = decode_text(f"{place}: {column}", value)
    if not isinstance(value, str):
        kind = EmptyRow if is_missing(value) else BadInput
        raise kind(f"{place}: {column}: expected text, found {type(value).__name__} {value!r:.60}{_hint_at(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can encode half a surrogate pair, which tokenizers reject
        raise BadInput(
            f"{place}: {column}: the text is not valid Unicode ({error.reason} at character {error.start}). Remove "
            "this character."
        ) from error
    return value


def _hint_at(value: object) -> str:
    """Return a hint for an error message if the value is NaN or null, which often stands for missing data, else ""."""
    return ", which stands for a missing value. Fill it in, or remove the row." if is_missing(value) else ""


def is_missing(value: object) -> bool:
    """Return whether a value is null or NaN, which often stand for missing data."""
    return value is None or (isinstance(value, float) and isnan(value))
