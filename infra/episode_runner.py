"""Environments in the process in which users' code runs (infra/runner.py): one object for each episode.

It imports nothing of ours but what lies beside it. A call names an episode with all of its turns so far: where the
object has seen all but the last, it takes that one; else a new object takes them all again. So a process that was lost
costs time and nothing else, as long as environments follow from problem, seed and turns.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ROLES = ("tool", "user", "system")


class ToolError(Exception):
    """A tool refuses what it was asked: the policy reads the message and goes on."""


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy wrote."""

    name: str
    arguments: Mapping[str, Any]
    error: str = ""
    """What is wrong with a call that could not be read; empty otherwise."""


@dataclass(frozen=True)
class EpisodeTurn:
    """What the policy wrote until it ended its turn."""

    text: str
    calls: tuple[ToolCall, ...]
    number: int
    """From 0."""


class NoStep(Exception):
    """What an environment returned is no step."""


# ---- what environments return


def observed(found: object, *, role: str) -> dict[str, Any]:
    """Read what `reset` or `step` returned.

    None: nothing is said, and after a step the episode is over. A text: the observation. Else `messages` (a text, or
    texts and `{role, content, name}`), `done` and `reward`, of a mapping or an object.
    """
    if found is None:
        return {"messages": [], "done": True, "reward": None}
    if isinstance(found, str):
        return {"messages": [_message(found, role)], "done": False, "reward": None}
    parts = found if isinstance(found, Mapping) else getattr(found, "__dict__", None)
    if not isinstance(parts, Mapping) or not {"messages", "done", "reward"} & set(parts):
        raise NoStep(f"expected a text, None, or messages, done and reward, found {type(found).__name__}")
    given = parts.get("messages") or ()
    if not isinstance(given, (str, Mapping, list, tuple)):
        raise NoStep(f"expected a text or a list as messages, found {given!r:.80}")
    messages = [given] if isinstance(given, (str, Mapping)) else list(given)
    return {
        "messages": [_message(each, role) for each in messages],
        "done": bool(parts.get("done", False)),
        "reward": _reward(parts.get("reward")),
    }


def _message(found: object, role: str) -> dict[str, str]:
    message = {"role": role, "content": found} if isinstance(found, str) else found
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
        raise NoStep(f"expected a message with a text as content, found {found!r:.80}")
    said = {"role": str(message.get("role", role)), "content": message["content"]}
    if said["role"] not in ROLES:
        raise NoStep(f"expected a message of role {', '.join(ROLES)}, found {said['role']!r}")
    return {**said, "name": str(message["name"])} if message.get("name") else said


def _reward(found: object) -> float | None:
    if found is None:
        return None
    if not isinstance(found, numbers.Real) or not math.isfinite(float(found)):
        raise NoStep(f"expected a finite number as reward, found {found!r:.40}")
    return float(found)


# ---- tools


class ToolBox:
    """An environment of functions: it answers every call, and a turn without one ends the episode."""

    def __init__(self, tools: Sequence[Callable[..., object]]) -> None:
        self.tools = tools

    def step(self, turn: EpisodeTurn) -> dict[str, Any] | None:
        """Answer the calls of a turn, in order."""
        named = {tool.__name__: tool for tool in self.tools}
        if not turn.calls:
            return None
        return {
            "messages": [{"role": "tool", "name": call.name, "content": answer(call, named)} for call in turn.calls]
        }


def answer(call: ToolCall, tools: Mapping[str, Callable[..., object]]) -> str:
    """Call a tool; what the policy did wrong is told to it. Raises whatever else the tool raises."""
    if call.error:
        return f"Error: {call.error}"
    if call.name not in tools:
        return f"Error: no tool {call.name!r}; the tools are {', '.join(tools)}"
    tool = tools[call.name]
    try:
        bound = inspect.signature(tool).bind(**call.arguments)
    except TypeError as error:
        return f"Error: {call.name}: {error}"
    try:
        found = tool(*bound.args, **bound.kwargs)
    except Exception as error:
        if isinstance(error, ToolError) or any(kind.__name__ == "ToolError" for kind in type(error).__mro__):
            return f"Error: {error}"
        raise
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


def schemas_of(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Describe tools as chat templates show them, by their type hints and docstrings. Raises ValueError.

    What is a schema already stays as it is.
    """
    if all(isinstance(tool, Mapping) for tool in tools):
        return list(tools)
    library = importlib.import_module("transformers.utils")  # takes seconds; whoever imports this file does not need it
    found = []
    for tool in tools:
        try:
            found.append(library.get_json_schema(tool))
        except Exception as error:  # the library raises several kinds
            raise ValueError(f"tool {getattr(tool, '__name__', tool)!r}: {error}") from error
    return found


# ---- episodes


class LiveEpisodes:
    """The objects of the episodes that are under way in this process."""

    def __init__(self, make: Callable[[], Any], role: str) -> None:
        self._make, self._role = make, role
        self._live: dict[str, tuple[Any, int]] = {}  # with the turns that it has seen

    def take(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Take an episode's last turn, or begin it where it has none."""
        turns = [turn_of(turn, number) for number, turn in enumerate(call["turns"])]
        environment, seen = self._live.pop(call["episode"], (None, -1))
        if environment is None or seen != len(turns) - 1:
            self._close(environment)
            environment, seen = self._make(), 0
            begin = getattr(environment, "reset", None)
            first = None if begin is None else begin(call["problem"], call["seed"])
            step = {**observed(first, role="user"), "done": False}
        for turn in turns[seen:]:
            step = observed(environment.step(turn), role=self._role)
        self._live[call["episode"]] = environment, len(turns)
        return step

    def close(self, names: Iterable[str]) -> None:
        """Close what is over; where one cannot be closed, the others are."""
        for name in names:
            with contextlib.suppress(Exception):
                self._close(self._live.pop(name, (None, 0))[0])

    @staticmethod
    def _close(environment: Any) -> None:  # noqa: ANN401 -- a user's object
        end = getattr(environment, "close", None)
        if end is not None:
            end()


def turn_of(told: Mapping[str, Any], number: int) -> EpisodeTurn:
    """Read a turn as it is told, with its number from 0."""
    return EpisodeTurn(told["text"], tuple(ToolCall(**call) for call in told["calls"]), number)
