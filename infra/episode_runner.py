"""Execution of environments in the process that runs users' code (infra/runner.py). Each episode has its own
environment object.

This file only imports files in the same folder. A request contains all turns of an episode so far. If the episode's
object has already processed all turns except the last, it processes only the last turn. Otherwise a new object
processes all turns again. If a process is lost, only time is lost, provided that the environment depends only on the
problem, the seed and the turns.
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
    """Raised when a tool rejects a call. The policy receives the error message, and the episode continues."""


@dataclass(frozen=True)
class ToolCall:
    """Tool call that was parsed from the output of the policy."""

    name: str
    arguments: Mapping[str, Any]
    error: str = ""
    """Reason why the call could not be parsed, or an empty string if it was parsed."""


@dataclass(frozen=True)
class EpisodeTurn:
    """Turn of an episode: the output of the policy, to which the environment responds."""

    text: str
    calls: tuple[ToolCall, ...]
    number: int
    """Index of the turn, starting at 0."""


class NoStep(Exception):
    """Raised when an environment returns a value that is not a valid step."""


# ---- return values of environments


def parse_step(value: object, *, role: str) -> dict[str, Any]:
    """Convert the return value of an environment's `reset` or `step` to a dictionary with `messages`, `done` and
    `reward`.

    None means that there is no message and, after `step`, that the episode has ended. A text is an observation.
    Otherwise the value must be a mapping or an object with `messages` (a text, or a list of texts and `{role, content,
    name}`), `done` or `reward`. Raises NoStep for any other value.
    """
    if value is None:
        return {"messages": [], "done": True, "reward": None}
    if isinstance(value, str):
        return {"messages": [_message(value, role)], "done": False, "reward": None}
    parts = value if isinstance(value, Mapping) else getattr(value, "__dict__", None)
    if not isinstance(parts, Mapping) or not {"messages", "done", "reward"} & set(parts):
        raise NoStep(f"expected a text, None, or messages, done and reward, found {type(value).__name__}")
    content = parts.get("messages") or ()
    if not isinstance(content, (str, Mapping, list, tuple)):
        raise NoStep(f"expected a text or a list as messages, found {content!r:.80}")
    messages = [content] if isinstance(content, (str, Mapping)) else list(content)
    return {
        "messages": [_message(each, role) for each in messages],
        "done": bool(parts.get("done", False)),
        "reward": _reward(parts.get("reward")),
    }


def _message(value: object, role: str) -> dict[str, str]:
    message = {"role": role, "content": value} if isinstance(value, str) else value
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
        raise NoStep(f"expected a message with a text as content, found {value!r:.80}")
    observation = {"role": str(message.get("role", role)), "content": message["content"]}
    if observation["role"] not in ROLES:
        raise NoStep(f"expected a message of role {', '.join(ROLES)}, found {observation['role']!r}")
    return {**observation, "name": str(message["name"])} if message.get("name") else observation


def _reward(value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, numbers.Real) or not math.isfinite(float(value)):
        raise NoStep(f"expected a finite number as reward, found {value!r:.40}")
    return float(value)


# ---- tools


class ToolBox:
    """Environment that consists only of tools. It responds to every tool call. A turn without tool calls ends the
    episode."""

    def __init__(self, tools: Sequence[Callable[..., object]]) -> None:
        self.tools = tools

    def step(self, turn: EpisodeTurn) -> dict[str, Any] | None:
        """Call the tools that a turn requests, in order, and return their responses. Return None if the turn contains
        no tool calls."""
        named = {tool.__name__: tool for tool in self.tools}
        if not turn.calls:
            return None
        return {
            "messages": [{"role": "tool", "name": call.name, "content": call_tool(call, named)} for call in turn.calls]
        }


def call_tool(call: ToolCall, tools: Mapping[str, Callable[..., object]]) -> str:
    """Call a tool and return its result. If the call is invalid, return an error message for the policy.

    Errors that the tool raises, except ToolError, are raised here.
    """
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
        result = tool(*bound.args, **bound.kwargs)
    except Exception as error:
        if isinstance(error, ToolError) or any(kind.__name__ == "ToolError" for kind in type(error).__mro__):
            return f"Error: {error}"
        raise
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def build_schemas(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the JSON schemas of tools for chat templates. The schemas are derived from type hints and docstrings.

    Tools that are already schemas are returned unchanged. Raises ValueError if a schema cannot be derived.
    """
    if all(isinstance(tool, Mapping) for tool in tools):
        return list(tools)
    library = importlib.import_module("transformers.utils")  # takes seconds, so it is only imported here
    schemas = []
    for tool in tools:
        try:
            schemas.append(library.get_json_schema(tool))
        except Exception as error:  # the library raises several kinds of errors
            name = getattr(tool, "__name__", tool)
            raise ValueError(f"no schema can be derived for the tool {name!r}: {error}") from error
    return schemas


# ---- episodes


class LiveEpisodes:
    """Environment objects of the unfinished episodes in this process."""

    def __init__(self, make: Callable[[], Any], role: str) -> None:
        self._make, self._role = make, role
        self._live: dict[str, tuple[Any, int]] = {}  # object and number of processed turns, by episode

    def step(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Process the last turn of an episode and return the resulting step. If the episode has no turns yet, start the
        episode."""
        turns = [parse_turn(turn, number) for number, turn in enumerate(call["turns"])]
        environment, processed = self._live.pop(call["episode"], (None, -1))
        if environment is None or processed != len(turns) - 1:
            self._close(environment)
            environment, processed = self._make(), 0
            begin = getattr(environment, "reset", None)
            first = None if begin is None else begin(call["problem"], call["seed"])
            step = {**parse_step(first, role="user"), "done": False}
        for turn in turns[processed:]:
            step = parse_step(environment.step(turn), role=self._role)
        self._live[call["episode"]] = environment, len(turns)
        return step

    def close(self, names: Iterable[str]) -> None:
        """Close finished episodes. If closing one episode fails, the others are still closed."""
        for name in names:
            with contextlib.suppress(Exception):
                self._close(self._live.pop(name, (None, 0))[0])

    @staticmethod
    def _close(environment: Any) -> None:  # noqa: ANN401 -- a user's object
        end = getattr(environment, "close", None)
        if end is not None:
            end()


def parse_turn(document: Mapping[str, Any], number: int) -> EpisodeTurn:
    """Return a turn from its JSON form. `number` is the index of the turn, starting at 0."""
    return EpisodeTurn(document["text"], tuple(ToolCall(**call) for call in document["calls"]), number)
