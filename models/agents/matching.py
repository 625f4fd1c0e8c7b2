"""Search for the turn that a request continues, by the request's messages or by its tokens. Does not import torch.

A request that repeats the messages of an earlier request and its answer, and adds results of tools or messages of the
user, continues the sampled tokens of that answer. The text of the answer is never tokenized again. Every other request
starts a new prompt. Programs change the answers that they send back: they drop the reasoning, replace null by an empty
string, and add fields. Only the role, the text, the tool calls and the ID of an answered call are therefore compared.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from threading import Lock
from typing import Any, Final, cast

from blake3 import blake3
from pydantic import JsonValue
from pydantic_core import from_json

from rheostat.models.agents.branches import EpisodeRecord, Place
from rheostat.models.config.policy_server import ObservedHistory
from rheostat.models.data.problems import NO_ARGUMENTS, Message, TemplateArguments
from rheostat.models.text.per_turn import render_prompt
from rheostat.models.text.turns import TurnFormat

THOUGHTS: Final = "reasoning_content"
"""Field of a message of the assistant with its reasoning, in the format of OpenAI-compatible servers."""


@dataclass(frozen=True, slots=True)
class ChatInput:
    """Chat that a request contains: its messages, and the tools and template variables with which it is rendered."""

    messages: tuple[Message, ...]
    arguments: TemplateArguments = NO_ARGUMENTS


class ChatIndex:
    """Index of the turns of an episode by the digest of the chat that ends with the turn. Several threads may use it
    concurrently."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._turns: dict[str, int] = {}

    def add(self, chat: ChatInput, answer: Message, number: int) -> None:
        """Add the turn `number`, with the message `answer`, as the answer to a chat."""
        whole = replace(chat, messages=(*chat.messages, answer))
        with self._lock:
            self._turns |= {_digests(whole, thoughts=thoughts)[-1]: number for thoughts in (True, False)}

    def find(self, chat: ChatInput) -> tuple[int, int] | None:
        """Find the longest prefix of a chat that ends with a recorded turn. Return the number of the turn, and the
        number of messages in the prefix, or None if there is no such prefix.

        Messages with the same reasoning are preferred to messages without reasoning. If several turns are equal, the
        last one is returned.
        """
        digests = [*zip(*(_digests(chat, thoughts=thoughts) for thoughts in (True, False)), strict=True)]
        with self._lock:
            for length in range(len(digests), 0, -1):
                for digest in digests[length - 1]:
                    if digest in self._turns:
                        return self._turns[digest], length
        return None


def match_messages(
    record: EpisodeRecord, index: ChatIndex, chat: ChatInput, form: TurnFormat, *, history: ObservedHistory
) -> Place:
    """Return the position of the turn that answers a chat. With history "append", the chat continues the recorded turn
    that `index` finds. Otherwise the whole chat is a new prompt. `form` is the format of turns without tools. Raises
    ValueError if the policy's chat template rejects the chat."""
    own_form = form.with_arguments(chat.arguments)
    found = index.find(chat) if history == "append" else None
    if found is not None:
        number, length = found
        context = _encode_new_messages(record, number, own_form, chat.messages[:length], chat.messages[length:])
        if context is not None:
            return record.place_after(number, context)
    return record.place_after(None, render_prompt(own_form, [*map(_with_objects, chat.messages)], ()))


def _with_objects(message: Message) -> Message:
    """Return a message in which the arguments of every tool call are the JSON text of an object, as chat templates
    require. Other texts, which a policy may generate, are wrapped in an object with the key `arguments`."""
    calls: list[JsonValue] = []
    for call in _calls_of(message):
        text = call["function"]["arguments"]
        is_object = isinstance(_decode(text), dict)
        arguments = text if is_object else json.dumps({"arguments": text}, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return replace(message, fields={**message.fields, "tool_calls": calls}) if calls else message


def _encode_new_messages(
    record: EpisodeRecord, number: int, form: TurnFormat, earlier: Sequence[Message], new: Sequence[Message]
) -> tuple[int, ...] | None:
    """Return the tokens of the messages after a turn. Return None if the messages cannot follow the turn token by
    token."""
    if not new or any(message.role not in ("tool", "user") for message in new):
        return None
    names = {call["id"]: call["function"]["name"] for call in _calls_of(earlier[-1])}
    named = [replace(each, name=each.name or names.get(str(each.fields.get("tool_call_id")), "")) for each in new]
    try:
        return form.encode_observation(named, ended=record.turn(number).tokens[-1] in form.ends)
    except ValueError:  # the template cannot render these messages after a turn, but may render the whole chat
        return None


def match_tokens(record: EpisodeRecord, tokens: Sequence[int]) -> Place:
    """Return the place at which a token sequence continues the episode: after the longest recorded turn whose whole
    sequence is a prefix of `tokens`, or as a new prompt."""
    whole = tuple(tokens)
    ends: dict[int | None, int] = {None: 0}
    """Turns whose whole sequences are a prefix of the tokens, with the lengths of the sequences."""
    for turn in record.turns():
        own, start = (*turn.context, *turn.tokens), ends.get(turn.parent)
        if start is not None and whole[start : start + len(own)] == own:
            ends[turn.number] = start + len(own)
    parent = max(ends, key=ends.__getitem__)
    return record.place_after(parent, whole[ends[parent] :])


# ---- digests of chats
def _digests(chat: ChatInput, *, thoughts: bool) -> list[str]:
    """Return one digest per message, each of the chat up to this message. `thoughts` is whether thoughts of the
    assistant are compared."""
    values = (canonical_message(message, thoughts=thoughts) for message in chat.messages)
    first = _hash([[dict(tool) for tool in chat.arguments.tools], dict(chat.arguments.kwargs)])
    return [*accumulate(values, lambda digest, value: _hash([digest, value]), initial=first)][1:]


def _hash(value: JsonValue) -> str:
    return blake3(json.dumps(value, sort_keys=True).encode()).hexdigest()


def canonical_message(message: Message, *, thoughts: bool = True) -> JsonValue:
    """Return the values of a message that are compared: role, text, tool calls, ID of the answered call, and with
    `thoughts` the thoughts of the assistant.

    The text of the assistant is compared without white space around it. Arguments of calls that are JSON text are
    compared as values.
    """
    text = message.text.strip() if message.role == "assistant" else message.text
    calls: list[JsonValue] = [
        [call["id"], call["function"]["name"], _decode(call["function"]["arguments"])] for call in _calls_of(message)
    ]
    answered, thought = message.fields.get("tool_call_id"), message.fields.get(THOUGHTS)
    return [message.role, text, calls, answered, thought if thoughts else None]


def _decode(arguments: str) -> JsonValue:
    """Return the decoded arguments of a call, or the text itself if it is not valid JSON."""
    try:
        return cast(JsonValue, from_json(arguments))
    except ValueError:
        return arguments


def _calls_of(message: Message) -> list[dict[str, Any]]:
    """Return the tool calls of a message in OpenAI's format."""
    return cast("list[dict[str, Any]]", message.fields.get("tool_calls") or [])
