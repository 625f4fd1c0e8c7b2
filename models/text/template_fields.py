"""Messages in the form that a chat template shows correctly: tool calls, content of several parts, absent content."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, Literal

from transformers import PreTrainedTokenizerFast

from rheostat.models.data.problems import NO_ARGUMENTS, TemplateArguments
from rheostat.models.text.chats import TemplateFailed, render_chats, select_template

Chat = Sequence[dict[str, object]]
"""Messages of a chat in the format of chat templates."""

_Arguments = Literal["unchanged", "objects", "texts"]

_MARK: Final = "part5w8d"
"""Word that no chat template writes by itself. It replaces texts of messages in trial chats, to see whether the
template shows them."""
_ARGUMENTS: Final = {"of4k7q": "it9x2v"}
_AS_TEXT: Final = json.dumps(_ARGUMENTS)
_PROBES: Final = 4
"""Maximum number of chats of one kind that are rendered in a trial. The form chosen in this trial is used for all chats
of the kind."""


@dataclass(frozen=True, slots=True)
class _Form:
    """Form in which messages are passed to a chat template: how tool-call arguments, multi-part content and absent
    content are represented."""

    arguments: _Arguments = "unchanged"
    """Form of the arguments of tool calls: as objects, as JSON text, or unchanged, as in the data file."""
    joins_texts: bool = False
    """Whether the texts of a message content with several parts are joined into one text."""
    fills_content: bool = False
    """Whether the absent content of a message is replaced by an empty text."""

    def apply(self, chat: Chat) -> list[dict[str, object]]:
        """Return the messages of a chat converted to this form."""
        return [self._convert(message) for message in chat]

    def _convert(self, message: dict[str, object]) -> dict[str, object]:
        if self.fills_content and "content" not in message:
            message = {**message, "content": ""}
        if self.joins_texts and (texts := _find_texts(message)) is not None:
            message = {**message, "content": "".join(texts)}
        if self.arguments == "unchanged" or not _has_calls(message):
            return message
        return _map_arguments(message, _decode_arguments if self.arguments == "objects" else _encode_arguments)


def fit_chats(
    chats: Sequence[Chat],
    tokenizer: PreTrainedTokenizerFast,
    arguments: Sequence[TemplateArguments] | None = None,
) -> list[Chat]:
    """Return chats in the form that the tokenizer's chat template shows correctly. `arguments` are the arguments of the
    template for each chat.

    A form that the template rejects, omits, or writes as a Python value is replaced: arguments of calls become objects
    or JSON text, contents of several texts become one text, and absent content becomes an empty text. Other messages
    stay unchanged.
    """
    given = arguments or [NO_ARGUMENTS] * len(chats)
    alike: dict[tuple[object, ...], list[int]] = {}
    for row, (chat, own) in enumerate(zip(chats, given, strict=True)):
        if kind := _describe_kind(chat):
            alike.setdefault((*kind, *_describe_template(tokenizer, own)), []).append(row)
    fitted = [*chats]
    for rows in alike.values():
        form = _choose_form([(chats[row], given[row]) for row in rows[:_PROBES]], tokenizer)
        for row in rows:
            fitted[row] = form.apply(chats[row])
    return fitted


def count_changes(before: Sequence[Chat], after: Sequence[Chat]) -> dict[str, int]:
    """Return how many chats `fit_chats` changed, by a description of the change, given the chats before and after the
    call."""
    changes: Counter[str] = Counter()
    for chat, fitted in zip(before, after, strict=True):
        kinds = set[str]()
        for message, new in zip(chat, fitted, strict=True) if chat != fitted else ():
            if message.get("tool_calls") != new.get("tool_calls"):
                is_text = any(isinstance(each, str) for each in _iterate_arguments(new))
                kinds.add(f"arguments of tool calls as {'JSON text' if is_text else 'objects'}")
            if "content" not in message and "content" in new:
                kinds.add("an empty text for absent content")
            elif message.get("content") != new.get("content"):
                kinds.add("several texts of a message as one text")
        changes.update(kinds)
    return dict(sorted(changes.items()))


def _describe_kind(chat: Chat) -> tuple[str, ...]:
    """Return the features of a chat's messages, such as tool calls, for which a chat template may require another form.
    Chats with equal features are of one kind."""
    kinds = set[str]()
    for message in chat:
        kinds |= {"empty"} if "content" not in message else set()
        kinds |= {"parts"} if _find_texts(message) is not None else set()
        kinds |= {type(each).__name__ for each in _iterate_arguments(message)}
    return tuple(sorted(kinds))


def _describe_template(tokenizer: PreTrainedTokenizerFast, arguments: TemplateArguments) -> tuple[str, str]:
    """Return the chat template that these arguments select, and the template variables as JSON text. Both can determine
    which form of messages the template shows correctly."""
    try:
        template = select_template(tokenizer, tools=arguments.tools)
    except TemplateFailed:
        template = ""
    return template, json.dumps(arguments.kwargs, sort_keys=True, default=dict)


def _choose_form(chats: Sequence[tuple[Chat, TemplateArguments]], tokenizer: PreTrainedTokenizerFast) -> _Form:
    """Return the form of messages in which the chat template shows most of these chats' contents. If several forms are
    equally good, the chats stay unchanged."""
    kinds = {kind for chat, _ in chats for kind in _describe_kind(chat)}
    arguments: tuple[_Arguments, ...] = ("unchanged", "objects", "texts")
    forms = product(
        arguments if kinds - {"empty", "parts"} else arguments[:1],
        (False, True) if "parts" in kinds else (False,),
        (False, True) if "empty" in kinds else (False,),
    )
    best, best_score = _Form(), -1.0
    for form in (_Form(*each) for each in forms):
        score = sum(_count_shown(form, chat, own, tokenizer) for chat, own in chats)
        if score > best_score:
            best, best_score = form, score
    return best


def _count_shown(form: _Form, chat: Chat, arguments: TemplateArguments, tokenizer: PreTrainedTokenizerFast) -> float:
    """Return how many kinds of values of a chat the chat template shows if the messages are passed in this form, or -1
    if the template fails."""
    probe = form.apply([_mark_values(message) for message in chat])
    try:
        [text] = render_chats(
            [probe], tokenizer, generation_prompt=True, tools=arguments.tools, kwargs=arguments.kwargs
        )
    except TemplateFailed:
        return -1
    shown = 0.5  # more than the sum of other chats that fail
    parts = [str({"type": "text", "text": _MARK}), str([{"type": "text", "text": _MARK}])[:-1]]
    shown += _MARK in text and not any(part in text for part in parts)
    is_text = any(isinstance(each, str) for message in probe for each in _iterate_arguments(message))
    if is_text:
        return shown + (_AS_TEXT in text)
    has_words = all(word in text for word in (*_ARGUMENTS, *_ARGUMENTS.values()))
    return shown + (has_words and str(_ARGUMENTS) not in text)


def _mark_values(message: dict[str, object]) -> dict[str, object]:
    """Return a message whose tool-call arguments and content parts are replaced by words that are easy to find in the
    rendered chat."""
    texts = _find_texts(message)
    if texts is not None:
        message = {**message, "content": [{"type": "text", "text": _MARK} for _ in texts]}
    if not _has_calls(message):
        return message
    return _map_arguments(message, lambda value: _AS_TEXT if isinstance(value, str) else _ARGUMENTS)


def _find_texts(message: Mapping[str, object]) -> list[str] | None:
    """Return the texts of a message content that is a list of text parts only, or None for other contents."""
    content = message.get("content")
    if not isinstance(content, list) or not all(isinstance(each, dict) and each["type"] == "text" for each in content):
        return None
    return [str(each["text"]) for each in content]


# ---- tool calls
def _has_calls(message: Mapping[str, object]) -> bool:
    return isinstance(message.get("tool_calls"), list)


def _iterate_arguments(message: Mapping[str, object]) -> Iterable[object]:
    """Yield the arguments of each tool call of a message."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        yield call.get("function", call)["arguments"]


def _map_arguments(message: Mapping[str, object], convert: Callable[[object], object]) -> dict[str, object]:
    """Return a message in which `convert` has been applied to the arguments of each tool call."""

    def convert_call(call: Mapping[str, object]) -> dict[str, object]:
        """Return a tool call, or the function inside it, with converted arguments."""
        if isinstance(function := call.get("function"), dict):
            return {**call, "function": convert_call(function)}
        return {**call, "arguments": convert(call["arguments"])}

    calls = message["tool_calls"]
    assert isinstance(calls, list), "the caller has checked that there are calls"
    return {**message, "tool_calls": [convert_call(call) for call in calls]}


def _decode_arguments(arguments: object) -> object:
    """Return the arguments of a tool call as an object. If they are JSON text, they are decoded."""
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def _encode_arguments(arguments: object) -> object:
    """Return the arguments of a tool call as JSON text. Arguments that are already a text stay unchanged."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
