"""Execution of environments in the process that runs users' code (infra/runner.py). Each episode has its own
environment object.

This file only imports files in the same folder. A request contains all turns of an episode so far. If the episode's
object has already processed all turns except the last, it processes only the last turn. Otherwise a new object
processes all turns again. If a process is lost, only time is lost, provided that the environment depends only on the
problem, the seed and the turns.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROLES = ("tool", "user", "system")
MAX_STEP_BYTES = (1 << 24) - (1 << 16)
"""Maximum size in bytes of the messages of one step, encoded as JSON. It is slightly less than 16 MiB, the limit for
sending a step, because a step has other fields too."""
KEPT_CHARACTERS = 1 << 20
"""Number of characters of the messages that are kept if a step is too large. One character takes at most 12 bytes of
JSON."""
OMISSION = "\n[...]\n"
"""Marker that replaces the removed middle of a long text."""


def _import_sibling(name: str) -> ModuleType:
    """Import a Python file from the folder that contains this file."""
    spec = importlib.util.spec_from_file_location(f"rheostat_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None, "the file exists"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


plain_values: Any = _import_sibling("plain_values")


class ToolError(Exception):
    """Exception that a tool raises to reject a call. The policy receives the error message, and the episode
    continues."""


@dataclass(frozen=True)
class ToolCall:
    """Tool call that was parsed from the output of the policy."""

    name: str
    arguments: Mapping[str, Any]
    error: str = ""
    """Reason why the call could not be parsed or has wrong arguments, or an empty string."""


@dataclass(frozen=True)
class EpisodeTurn:
    """Turn of an episode: the output of the policy, to which the environment responds."""

    text: str
    calls: tuple[ToolCall, ...]
    number: int
    """Index of the turn, starting at 0."""


class NoStep(Exception):
    """Raised when an environment or tool returns a value that cannot be converted to a step of an episode."""


# ---- return values of environments


def parse_step(value: object, *, role: str) -> dict[str, Any]:
    """Convert the return value of an environment's `reset` or `step` to a dictionary with `messages`, `done` and
    `reward`. `role` is the default role of the messages.

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
        raise NoStep(
            "the environment must return a text, None, or an object with messages, done or reward, but it returned "
            f"{plain_values.describe_type(value)}"
        )
    content = parts.get("messages") or ()
    if not isinstance(content, (str, Mapping, list, tuple)):
        raise NoStep(
            f"`messages` must be a text or a list, but the environment returned {plain_values.describe_value(content)}"
        )
    messages = [content] if isinstance(content, (str, Mapping)) else list(content)
    return {
        "messages": [_message(each, role) for each in messages],
        "done": bool(parts.get("done", False)),
        "reward": _reward(parts.get("reward")),
    }


def _message(value: object, role: str) -> dict[str, str]:
    message = {"role": role, "content": value} if isinstance(value, str) else value
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
        raise NoStep(
            "each message must have a text as its content, but the environment returned "
            f"{plain_values.describe_value(value)}"
        )
    repair_text = plain_values.repair_text
    observation = {"role": str(message.get("role", role)), "content": repair_text(message["content"])}
    if observation["role"] not in ROLES:
        raise NoStep(
            f"each message must have one of the roles {', '.join(ROLES)}, but the environment returned "
            f"{observation['role']!r}"
        )
    return {**observation, "name": repair_text(str(message["name"]))} if message.get("name") else observation


def _reward(value: object) -> float | None:
    if value is None:
        return None
    try:
        number: float = plain_values.to_number(value)
    except plain_values.InvalidValue:
        is_plain = isinstance(value, (str, bool, int, float))
        description = f"{value!r:.40}" if is_plain else plain_values.describe_type(value)
        raise NoStep(f"the reward must be a finite number, but the environment returned {description}") from None
    return number


def shorten_step(step: Mapping[str, Any]) -> dict[str, Any]:
    """Return a step whose messages are small enough to be sent to the parent process. Long texts lose their middle.
    Raises NoStep if the step has too many messages."""
    messages = step["messages"]
    if sum(map(_size_of, messages)) <= MAX_STEP_BYTES:
        return dict(step)
    num_kept = KEPT_CHARACTERS // len(messages)
    shorter = [{**each, "content": _drop_middle(each["content"], num_kept)} for each in messages]
    if sum(map(_size_of, shorter)) > MAX_STEP_BYTES:
        raise NoStep(
            f"the messages of one turn may have at most {MAX_STEP_BYTES} bytes together, which {len(messages)} "
            "messages exceed"
        )
    return {**step, "messages": shorter}


def _size_of(message: Mapping[str, str]) -> int:
    """Return the size of a message as JSON, in bytes."""
    return len(json.dumps(message))


def _drop_middle(text: str, num_kept: int) -> str:
    """Shorten a text to its first and last characters, `num_kept` in total, with a marker between them."""
    if len(text) <= num_kept:
        return text
    return f"{text[: (num_kept + 1) // 2]}{OMISSION}{text[len(text) - num_kept // 2 :]}"


# ---- tools


class ToolBox:
    """Environment that consists only of tools. It runs the tool calls of each turn. A turn without tool calls ends the
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
    """Call the tool that a policy requested, and return its result as text. If the call is invalid or the tool raises
    ToolError, return an error message for the policy. Other errors of the tool are not caught."""
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
    if isinstance(result, str):
        return result
    return json.dumps(plain_values.to_json_value(result), ensure_ascii=False, default=_refuse_result)


def _refuse_result(value: object) -> object:
    """Raise NoStep because the result of a tool contains an object that cannot be encoded as JSON. Used as the
    `default` function of `json.dumps`."""
    kind = plain_values.describe_type(value)
    raise NoStep(f"a tool must return a text or a JSON value, but it returned {kind}")


def build_schemas(tools: Sequence[Any], *, skip_unknown: bool = False) -> list[dict[str, Any]]:
    """Return JSON schemas that describe tools to the policy, for use in chat templates. They are derived from type
    hints and docstrings.

    Tools that are schemas already are returned unchanged. With `skip_unknown`, docstrings are not required, and tools
    whose type hints are not sufficient are left out. Otherwise raises ValueError if a schema cannot be derived.
    """
    if all(isinstance(tool, Mapping) for tool in tools):
        return list(tools)
    library = importlib.import_module("transformers.utils")  # takes seconds, so it is only imported here
    schemas = []
    for tool in tools:
        try:
            schemas.append(library.get_json_schema(tool))
        except Exception as error:  # the library raises several kinds of errors
            if skip_unknown:
                schemas += _schemas_from_type_hints(tool, library)
                continue
            name = getattr(tool, "__name__", tool)
            raise ValueError(
                f"no JSON schema can be derived for the tool {name!r} from its signature: {error}. Annotate its "
                "parameters"
            ) from error
    return schemas


def _schemas_from_type_hints(tool: Callable[..., object], library: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    """Return a list with the schema of a tool, derived from its type hints without a docstring. Return an empty list if
    the type hints are not sufficient."""

    @functools.wraps(tool)
    def documented(*args: object, **kwargs: object) -> object:
        """Call the tool. This wrapper gets a generated docstring, because the library needs one with every
        parameter."""
        return tool(*args, **kwargs)

    try:
        signature = inspect.signature(tool).parameters
        if inspect.Parameter.VAR_KEYWORD in {each.kind for each in signature.values()}:
            return []
        documented.__doc__ = "A tool.\n\nArgs:\n" + "".join(f"    {name}: A value.\n" for name in signature)
        parameters = library.get_json_schema(documented)["function"]["parameters"]
        for each in parameters["properties"].values():
            del each["description"]
        return [{"type": "function", "function": {"name": tool.__name__, "parameters": parameters}}]
    except Exception:  # any failure of the library means that the tool accepts all arguments
        return []


# ---- episodes


class LiveEpisodes:
    """Environment objects of all unfinished episodes in this process. They are kept between turns, so that each turn of
    an episode is processed only once."""

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
        return shorten_step(step)

    def close(self, names: Iterable[str]) -> None:
        """Close the environments of finished episodes, given by name. If closing one fails, the others are still
        closed."""
        for name in names:
            with contextlib.suppress(Exception):
                self._close(self._live.pop(name, (None, 0))[0])

    @staticmethod
    def _close(environment: Any) -> None:  # noqa: ANN401 -- a user's object
        end = getattr(environment, "close", None)
        if end is not None:
            end()


def parse_turn(document: Mapping[str, Any], number: int) -> EpisodeTurn:
    """Convert a turn from JSON to an `EpisodeTurn`. `number` is the index of the turn, starting at 0."""
    calls = (ToolCall(call["name"], call["arguments"], call["error"]) for call in document["calls"])
    return EpisodeTurn(document["text"], tuple(calls), number)
