"""Chat prompts as text for judges: messages, tools and tool calls, each escaped and in tags. Torch-free."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Final

from pydantic import JsonValue

from rheostat.models.data.problems import NO_ARGUMENTS, ImagePlace, Message, Prompt, TemplateArguments

_TAGS: Final = {"tool_calls": "tool_call", "tool_call_id": "answers_call"}
"""Tags for the message fields whose tag in a judge's question differs from the field's name."""


# Control characters, and characters that reorder or hide text. Newline and tab are kept.
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")

# Special tokens in square brackets, such as [INST], [SEP], [gMASK], [@BOS@]. All others need angle brackets.
_TURN: Final = re.compile(r"\[(/?@?[a-z]?[A-Z_]+@?|control_[0-9]+|multimodal)\]")

# Wide and small brackets, which some tokenizers normalize to the brackets of tags.
_ALIKE: Final = re.compile(
    "[\N{FULLWIDTH LESS-THAN SIGN}\N{FULLWIDTH GREATER-THAN SIGN}\N{SMALL LESS-THAN SIGN}"
    "\N{SMALL GREATER-THAN SIGN}\N{FULLWIDTH LEFT SQUARE BRACKET}\N{FULLWIDTH RIGHT SQUARE BRACKET}]"
)


def escape(text: str) -> str:
    """Escape a text so that it contains no tag, no special token of a chat template and no control character.

    >>> escape("<|im_end|> [INST] a < b")
    '&lt;|im_end|&gt; &#91;INST&#93; a &lt; b'
    """
    visible = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
    quoted = visible.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _ALIKE.sub(lambda mark: f"&#{ord(mark[0])};", _TURN.sub(r"&#91;\1&#93;", quoted))


def mark_prompt(prompt: Prompt, arguments: TemplateArguments = NO_ARGUMENTS) -> str:
    """Return the messages of a chat in tags, preceded by the tools that the chat shows. All texts are escaped.

    If the chat is a single user message without tools or other fields, only its text is returned, as for a plain-text
    prompt.

    >>> mark_prompt((Message("system", "Be kind."), Message("user", "a < b?")))
    '<message role="system">\\nBe kind.\\n</message>\\n<message role="user">\\na &lt; b?\\n</message>'
    """
    if isinstance(prompt, str):
        return escape(prompt)
    is_plain = not arguments.tools and [message.role for message in prompt] == ["user"]
    if is_plain and not prompt[0].fields and not prompt[0].name:
        return _mark_content(prompt[0])
    tools = [_mark("tool", _encode(tool)) for tool in arguments.tools]
    return "\n".join([*tools, *map(_mark_message, prompt)])


def _mark_message(message: Message) -> str:
    """Return a message in tags, with each of its fields in separate tags inside."""
    name = f' name="{escape(message.name).replace(chr(34), "&quot;")}"' if message.name else ""
    role = escape(message.role).replace('"', "&quot;")
    parts = [_mark_content(message), *_mark_fields(message)]
    return "\n".join([f'<message role="{role}"{name}>', *filter(None, parts), "</message>"])


def _mark_content(message: Message) -> str:
    """Return the escaped content of a message. Each image is represented by a tag at its place."""
    return "".join("<image/>" if isinstance(part, ImagePlace) else escape(part) for part in message.parts)


def _mark_fields(message: Message) -> Iterator[str]:
    """Yield each field of a message in tags. Each tool call has a separate pair of tags."""
    for name, value in message.fields.items():
        values: Sequence[JsonValue] = value if isinstance(value, list) else [value]
        for each in values:
            function = each.get("function", each) if isinstance(each, dict) else each
            yield _mark(_TAGS.get(name, name), each if isinstance(each, str) else _encode(function))


def _encode(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _mark(tag: str, text: str) -> str:
    """Return `<tag>text</tag>` with the text escaped."""
    return f"<{tag}>\n{escape(text)}\n</{tag}>"
