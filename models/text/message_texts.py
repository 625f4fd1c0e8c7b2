"""Texts of a message: its content and all texts in its other fields, as a list, or changed one by one. Torch-free."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from rheostat.models.data.problems import Message, TemplateArguments


def as_message(arguments: TemplateArguments) -> Message:
    """Return the texts of chat template arguments, such as tool schemas, as a message, so that control tokens can be
    found in them as in other messages."""
    return Message(
        "user", "", fields={"tools": [dict(tool) for tool in arguments.tools], "kwargs": {**arguments.kwargs}}
    )


def list_texts(message: Message) -> list[str]:
    """Return all texts of a message, in its content and its other fields, that are not empty. Texts of adjacent parts
    of the content are joined."""
    texts = list[str]()

    def add_text(text: str) -> str:
        texts.append(text)
        return text

    map_message(message, add_text)
    return texts


def map_message(message: Message, change: Callable[[str], str]) -> Message:
    """Return a message with each of its texts replaced by the result of `change`, which must keep the text's length.
    Texts of adjacent parts of the content are changed as one text."""
    others = (each.name for each in fields(message) if each.name != "content")
    values = {name: _map_texts(getattr(message, name), change) for name in others}
    return replace(message, content=_map_content(message, change), **values)


def _map_content(message: Message, change: Callable[[str], str]) -> Any:  # noqa: ANN401 -- the content of a message
    """Return the content of a message with its text changed. If the content has several parts, `change` receives the
    texts of all parts as one text."""
    if not isinstance(message.content, tuple):
        return change(message.content) if message.content else message.content
    changed, at = change(message.text), 0
    parts = list[Any]()
    for part in message.content:
        if isinstance(part, str):
            parts.append(changed[at : at + len(part)])
            at += len(part)
        else:
            parts.append(part)
    return tuple(parts)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:  # noqa: ANN401 -- a field of a message
    """Return the value of a message's field with each text in it changed, including the keys of objects."""
    match value:
        case str():
            return change(value) if value else value
        case Mapping():
            return {change(str(key)): _map_texts(each, change) for key, each in value.items()}
        case tuple():
            return tuple(_map_texts(each, change) for each in value)
        case list():
            return [_map_texts(each, change) for each in value]
        case _:
            return value
