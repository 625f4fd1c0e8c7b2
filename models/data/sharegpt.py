"""Chats in the format of ShareGPT (`from` and `value`), converted to messages with `role` and `content`."""

import json
from collections.abc import Mapping, Sequence
from typing import Final

from rheostat.infra.errors import BadInput
from rheostat.infra.plugins import nearest_name

ROLES: Final = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bot"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
"""Role of the message that a turn of a ShareGPT chat becomes, by the author (`from`) of the turn."""
CALL: Final = "function_call"
"""Author (`from`) of a turn in which the assistant calls tools. The text of the turn is one call, or a list of calls,
as JSON."""


def is_sharegpt_turn(turn: object) -> bool:
    """Return whether a value is a turn of a ShareGPT chat: an object with `from` and without `role`."""
    return isinstance(turn, Mapping) and turn.get("from") is not None and turn.get("role") is None


def convert_turns(place: str, turns: Sequence[object], column: str) -> list[object]:
    """Return the turns of a chat as messages with `role` and `content`. Turns that are not in ShareGPT's format are
    returned unchanged.

    Raises BadInput, which names `place` and `column`, if the author of a turn is unknown or a call is not JSON.
    """
    return [
        _convert_turn(place, turn, f"{column}[{index}]")
        if isinstance(turn, Mapping) and is_sharegpt_turn(turn)
        else turn
        for index, turn in enumerate(turns)
    ]


def _convert_turn(place: str, turn: Mapping[str, object], column: str) -> dict[str, object]:
    """Return one turn as a message. Fields of the turn other than `from` and `value` are kept."""
    others = {name: value for name, value in turn.items() if name not in ("from", "value", "role")}
    author = turn["from"]
    name = author.strip().lower() if isinstance(author, str) else ""
    if name == CALL:
        return {"role": "assistant", "content": None, "tool_calls": _read_calls(place, turn, column), **others}
    if name not in ROLES:
        known = (*ROLES, CALL)
        raise BadInput(
            f"{place}: {column}.from: {author!r:.40} is not a known author of a "
            f"turn{nearest_name(name, known) or '.'} Turns of ShareGPT chats must have one of the authors "
            f"{', '.join(known)}. Rename the author."
        )
    if "value" not in turn:
        raise BadInput(
            f"{place}: {column}: the turn has no text. Each turn must be {{from, value}} with a text as value, found "
            f"{dict(turn)!r:.80}. Fill in the text, or remove the turn."
        )
    return {"role": ROLES[name], "content": turn["value"], **others}


def _read_calls(place: str, turn: Mapping[str, object], column: str) -> list[object]:
    """Return the tool calls in the text of a turn, in OpenAI's format. Raises BadInput if the text is not JSON."""
    text = turn.get("value")
    try:
        value = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError) as error:
        raise BadInput(
            f"{place}: {column}.value: a turn by {CALL!r} must contain a tool call as JSON, but reading it failed: "
            f"{error}. Correct the JSON."
        ) from error
    calls = value if isinstance(value, list) else [value]
    return [
        call if isinstance(call, dict) and "function" in call else {"type": "function", "function": call}
        for call in calls
    ]
