"""Message fields and chat templates: conversion of fields to the format that a template expects, and detection of
fields that it ignores."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from transformers import PreTrainedTokenizerFast

from models.data.problems import Message, Prompt, TemplateArguments
from models.text.chats import TemplateFailed, find_names, render_chats, select_template

Chat = Sequence[dict[str, object]]
"""Messages of a chat in the format of chat templates."""

_QUESTION: Final[dict[str, object]] = {"role": "user", "content": "Hello."}
_ARGUMENTS: Final = {"of": "it"}
_NONE: Final = "None"
KWARGS: Final = "chat_template_kwargs."


def fit_chats(chats: Sequence[Chat], tokenizer: PreTrainedTokenizerFast) -> list[Chat]:
    """Return the chats with tool calls and contents in the format that the tokenizer's chat template expects.

    Arguments of calls are objects, or JSON text if the template only accepts text, like the template of DeepSeek V3. A
    content of None becomes an empty text if the template would otherwise write the word "None" or fail.
    """
    messages = [message for chat in chats for message in chat]
    as_texts = any("tool_calls" in each for each in messages) and _requires_argument_texts(tokenizer)
    as_empty = any(each["content"] is None for each in messages) and not _accepts_no_content(tokenizer)

    def fit(message: dict[str, object]) -> dict[str, object]:
        """Return the message in the format of the template."""
        fitted = {**message, "content": ""} if as_empty and message["content"] is None else message
        calls = fitted.get("tool_calls")
        if not as_texts or not isinstance(calls, list):
            return fitted
        return {**fitted, "tool_calls": [_encode_arguments(call) for call in calls]}

    return [[fit(message) for message in chat] for chat in chats] if as_texts or as_empty else [*chats]


def _encode_arguments(call: Mapping[str, object]) -> dict[str, object]:
    """Return a tool call with its arguments as JSON text."""
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": _encode_arguments(function)}
    return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}


def _requires_argument_texts(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return whether the template fails if arguments are objects but renders arguments that are JSON text."""
    as_object, as_text = (_render_call(tokenizer, arguments, "") for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)))
    return as_object is None and as_text is not None


def _accepts_no_content(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return whether the template renders a tool call whose message has no content, without writing the word "None"."""
    arguments = json.dumps(_ARGUMENTS) if _requires_argument_texts(tokenizer) else _ARGUMENTS
    without, empty = (_render_call(tokenizer, arguments, content) for content in (None, ""))
    if without is None:
        return empty is None
    return without.count(_NONE) == (empty or "").count(_NONE)


def _render_call(tokenizer: PreTrainedTokenizerFast, arguments: object, content: str | None) -> str | None:
    """Render a chat that contains a tool call, or return None if the template fails."""
    call = {"id": "000000000", "type": "function", "function": {"name": "find", "arguments": arguments}}
    turn: dict[str, object] = {"role": "assistant", "content": content, "tool_calls": [call]}
    try:
        [text] = render_chats([[_QUESTION, turn]], tokenizer, generation_prompt=False)
    except TemplateFailed:
        return None
    return text


def count_unread_fields(
    prompts: Iterable[tuple[Prompt, TemplateArguments]], tokenizer: PreTrainedTokenizerFast
) -> dict[str, int]:
    """Return, for each field that the tokenizer's chat template ignores, the number of prompts that contain it.

    Names of template variables begin with `chat_template_kwargs.`; `tools` are the tools of a prompt. A field counts as
    used if its name occurs in the template, or if the first prompt that has it is rendered differently without it.
    """
    suspects: Counter[str] = Counter()
    first: dict[str, tuple[Sequence[Message], TemplateArguments]] = {}
    names: dict[str, tuple[frozenset[str], frozenset[str]]] = {}
    for prompt, arguments in prompts:
        if isinstance(prompt, str) or not tokenizer.chat_template:
            continue
        fields = {field for message in prompt for field in (*message.fields, *(["name"] if message.name else []))}
        if not fields and not arguments.tools and not arguments.kwargs:
            continue
        template = select_template(tokenizer, tools=arguments.tools)
        if template not in names:
            names[template] = find_names(template)
        variables, attributes = names[template]
        unread = fields - attributes
        unread |= {f"{KWARGS}{name}" for name in arguments.kwargs if name not in variables}
        unread |= {"tools"} if arguments.tools and "tools" not in variables else set()
        suspects.update(unread)
        for name in unread:
            first.setdefault(name, (prompt, arguments))
    return {name: suspects[name] for name in sorted(suspects) if not _changes_prompt(name, *first[name], tokenizer)}


def _changes_prompt(
    name: str, prompt: Sequence[Message], arguments: TemplateArguments, tokenizer: PreTrainedTokenizerFast
) -> bool:
    """Return whether the template renders a prompt differently without the field `name`."""

    def render(messages: Sequence[Message], given: TemplateArguments) -> str:
        """Render a chat with template arguments."""
        chat = [message.encode() for message in messages]
        [text] = render_chats(
            fit_chats([chat], tokenizer), tokenizer, generation_prompt=True, tools=given.tools, kwargs=given.kwargs
        )
        return text

    if name == "tools":
        changed = prompt, replace(arguments, tools=())
    elif name.startswith(KWARGS):
        kwargs = {key: value for key, value in arguments.kwargs.items() if f"{KWARGS}{key}" != name}
        changed = prompt, replace(arguments, kwargs=kwargs)
    else:
        changed = [*_drop_field(prompt, name)], arguments
    try:
        return render(prompt, arguments) != render(*changed)
    except TemplateFailed:
        return True


def _drop_field(prompt: Sequence[Message], name: str) -> Iterator[Message]:
    """Yield the messages of a prompt without the field `name`."""
    for message in prompt:
        fields = {key: value for key, value in message.fields.items() if key != name}
        yield replace(message, name="" if name == "name" else message.name, fields=fields)
