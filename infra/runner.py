"""The process in which users' functions run: it imports nothing of ours.

Run as a file, by the interpreter that the user chose (CPython 3.9 or newer), with the user's folders first on its path.
It is given an order, says whether the functions can be used (which of them take images, or what is wrong), and then
answers call by call:
`[token, value, reason, end]`, where an end is how a call's own process ended without a value. A frame is four bytes
with the length of the JSON that follows; frames alone go through the first stdin and stdout, which functions do not
get to see.
"""

from __future__ import annotations

import base64
import ctypes
import difflib
import functools
import importlib
import importlib.util
import inspect
import json
import math
import numbers
import os
import pkgutil
import re
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

OLDEST = (3, 9)
"""The oldest Python that runs this file."""
LENGTH_BYTES = 4
MAX_ANSWER = 1 << 24
STOP = "stop"
"""Frame that stops the running program. The answer is the output of the program so far."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Unusable(ValueError):
    """What a user named cannot be imported, or not be called as it will be."""


class NoValue(Exception):
    """What a function returned is no value."""


# ---- finding what users name


def find(target: str, where: str) -> object:
    """Import `pkg.mod:attribute`. Raises Unusable, with the nearest name; `where` begins its message."""
    module_name, _, path = target.partition(":")
    found: object = _module(module_name, where)
    for name in path.split("."):
        if not hasattr(found, name):
            raise Unusable(f"{where}: no attribute {name!r} in {found!r}{nearest_name(name, dir(found))}")
        found = getattr(found, name)
    return found


def check_call(
    function: Callable[..., object], *parameters: str, where: str, named: Mapping[str, object] | None = None
) -> None:
    """Raise Unusable unless a function takes these parameters, the named ones by keyword."""
    given = named or {}
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-ins do not tell; the call itself will
        return
    try:
        signature.bind(*parameters, **given)
    except TypeError as error:
        wanted = ", ".join((*parameters, *(f"{name}=…" for name in given)))
        raise Unusable(f"{where}: expected to call it with ({wanted}), found {signature}: {error}") from error


def nearest_name(name: str, known: Iterable[str]) -> str:
    """`, did you mean 'x'?`, or nothing where no known name is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {near[0]!r}?" if near else ""


def _module(name: str, where: str) -> object:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise Unusable(f"{where}: its module needs {error.name!r}, which is not installed") from error
        raise Unusable(f"{where}: no module {error.name!r}{nearest_name(error.name, _siblings(error.name))}") from error
    except (Exception, SystemExit) as error:  # whatever a user's module raises means that it cannot be used
        raise Unusable(f"{where}: importing it failed: {type(error).__name__}: {error}") from error


def _siblings(name: str) -> Iterable[str]:
    parent, _, _ = name.rpartition(".")
    if not parent:
        return (module.name for module in pkgutil.iter_modules())
    folders = getattr(importlib.import_module(parent), "__path__", ())
    return (f"{parent}.{module.name}" for module in pkgutil.iter_modules(folders))


# ---- what a function returns


def value_of(
    call: Callable[[], object], expected: int | None, part: str
) -> tuple[float | list[float] | None, str | None]:
    """Return a number, or as many as expected (-1: any) of parts; or none and the reason, whatever the function did."""
    try:
        found = call()
        return (_number(found) if expected is None else _numbers(found, part, expected)), None
    except NoValue as error:
        return None, one_line(str(error))
    except BaseException as error:  # KeyboardInterrupt too: it can only be the function's own, by the signal's default
        return None, one_line(f"{type(error).__name__}: {_told(error)}")


def one_line(message: str) -> str:
    """Shorten, and mask memory addresses: the reason is part of a shard, and the same inputs give the same digest."""
    masked = re.sub(r"\b0x[0-9a-f]+", "0x…", " ".join(message.split()))
    return masked[:200].encode("utf-8", "replace").decode()


def _told(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:
        return "it cannot be told"


def _numbers(found: object, part: str, expected: int) -> list[float]:
    if not isinstance(found, Iterable) or isinstance(found, (str, bytes, Mapping)):
        raise NoValue(f"expected {expected} floats, one for each of the {part}, found {type(found).__name__}")
    values = [_number(value) for value in (islice(found, expected + 1) if expected >= 0 else found)]
    if len(values) != expected >= 0:
        more = "more" if len(values) > expected else str(len(values))
        raise NoValue(f"expected {expected} floats, one for each of the {part}, found {more}")
    return values


def _number(found: object) -> float:
    if not isinstance(found, numbers.Real):
        raise NoValue(f"expected a float, found {type(found).__name__}")
    number = float(found)
    if not math.isfinite(number):
        raise NoValue(f"expected a finite float, found {number}")
    return number


# ---- the process


def frame(content: object) -> bytes:
    """Return content as it goes through the pipe."""
    body = json.dumps(content).encode()
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def _receive(stream: BinaryIO) -> Any:  # noqa: ANN401 - JSON that ours has written
    """Read a frame; none at the end of the pipe."""
    head = stream.read(LENGTH_BYTES)
    return json.loads(stream.read(int.from_bytes(head, "big"))) if len(head) == LENGTH_BYTES else None


def _send(pipe: int, content: object) -> None:
    _write(pipe, frame(content))


def _write(pipe: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(pipe, left) :]


def _load(function: Mapping[str, Any]) -> tuple[Callable[..., object], list[str]]:
    """Import a function and prove that it takes (prompt, completion, answer, **options), and its parts.

    Also returns which of `images` and `messages` it has as parameters, which are then given to it.
    """
    where, target, options, part = (function[name] for name in ("where", "target", "options", "part"))
    _forget(target.partition(":")[0].partition(".")[0])
    found = find(target, where)
    if not callable(found) or inspect.iscoroutinefunction(found):
        raise Unusable(f"{where}: expected a function that returns a float, or several, found {found!r}")
    if function["made"]:
        made: Callable[..., object] = found(**options)
        return made, _shown_to(made)
    named = {part: [], **options} if part else options
    takes = [name for name in _shown_to(found) if name not in named]
    named = {**{name: [] for name in takes}, **named}
    check_call(found, "prompt", "completion", "answer", where=where, named=named)
    return functools.partial(found, **options), takes


def _shown_to(function: Callable[..., object]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some built-ins do not tell
        return []
    return [name for name in ("images", "messages") if name in parameters]


def _forget(name: str) -> None:
    """Have a user's file found that bears the name of a module which this process uses itself."""
    loaded = getattr(sys.modules.get(name), "__spec__", None)
    if loaded is not None and loaded.has_location:
        before = sys.modules.pop(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin == loaded.origin:
            sys.modules[name] = before


def _beside(name: str) -> ModuleType:
    """Import a file that lies beside this one."""
    spec = importlib.util.spec_from_file_location(f"rheostat_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None, "it lies there"
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def die_with(parent: int) -> None:
    """Have the kernel kill this process, even one that hangs or is stopped, when its parent dies, however (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def serve_episodes(order: Mapping[str, Any], calls: BinaryIO, answers: int) -> None:
    """Load an environment, or tools, and answer turn by turn. Raises ValueError if they cannot be used."""
    episodes_module = _beside("episode_runner")
    make, tools = _environment(order, episodes_module.ToolBox)
    _send(answers, episodes_module.schemas_of(tools) if order["describes"] else [])
    episodes = episodes_module.LiveEpisodes(make, order["role"])
    while (call := _receive(calls)) is not None:
        try:
            episodes.close(call["closed"])
            step, reason = episodes.take(call) if call["episode"] else None, None
        except BaseException as error:  # whatever an environment raises is its own fault
            step, reason = None, one_line(f"{type(error).__name__}: {_told(error)}")
        _send(answers, [call["token"], step, reason, None])


def _environment(order: Mapping[str, Any], tool_box: Callable[..., object]) -> tuple[Callable[[], object], list[Any]]:
    """Import what makes an environment for each episode, and the tools that it offers."""
    where, options = order["where"], order["options"]
    for target in (order["target"], *order["tools"]):
        _forget(target.partition(":")[0].partition(".")[0])
    if not order["target"]:
        tools = [find(tool, f"tool {tool!r}") for tool in order["tools"]]
        for tool in tools:
            if not callable(tool):
                raise Unusable(f"{where}: expected functions as tools, found {tool!r}")
        return (lambda: tool_box(tools)), tools
    found = find(order["target"], where)
    if not callable(found) or not callable(getattr(found, "step", None)):
        raise Unusable(f"{where}: expected a class with a method step(turn), found {found!r}")
    check_call(found, where=where, named=options)
    offered: Any = getattr(found, "tools", ())
    if callable(offered):  # those of a server, which takes its time to start and tell them
        try:
            offered = offered(**options)
        except ValueError:
            if order["describes"]:
                raise
            offered = ()  # it may be back when it is asked
    return functools.partial(found, **options), [*offered]


def serve_programs(box: Any, limits: Mapping[str, int], calls: BinaryIO, answers: int) -> None:  # noqa: ANN401
    """Run program after program."""
    _send(answers, [])
    while (call := _receive(calls)) is not None:
        if call == STOP:  # the program that it was meant for has ended
            continue
        try:
            found, reason = box.run_program(call, limits, (calls.fileno(), answers)), None
        except OSError as error:  # the sandbox's own: a program cannot raise here
            found, reason = None, one_line(f"{type(error).__name__}: {error}")
        _send(answers, [call["token"], found, reason, None])


def _answer(asked: Callable[[], object], pipe: int) -> None:
    _write(pipe, json.dumps(asked()).encode())


def serve_functions(order: Mapping[str, Any], box: ModuleType | None, calls: BinaryIO, answers: int) -> None:
    """Load functions and call them, in a sandbox in forks. Raises ValueError if they cannot be used."""
    functions = [_load(function) for function in order["functions"]]
    _send(answers, [takes for _, takes in functions])
    while (call := _receive(calls)) is not None:
        function, takes = functions[call["function"]]
        shown = {"images": [base64.b64decode(image) for image in call["images"]], "messages": call["messages"]}
        taken = {name: shown[name] for name in takes}
        bound = functools.partial(function, *call["arguments"], **call["named"], **taken)
        asked = functools.partial(value_of, bound, call["expected"], "".join(call["named"]))
        if box is None:
            found = [*asked(), None]
        else:
            hidden = calls.fileno(), answers
            body = functools.partial(_answer, asked)
            found = box.decoded(*box.collected(body, order["limits"], most=MAX_ANSWER, hidden=hidden))
        _send(answers, [call["token"], *found])


def main() -> None:
    """Load what the order names, then answer calls until the pipe ends."""
    calls, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what functions print
    order = _receive(calls)
    limits = order["limits"]
    if limits is None:
        die_with(order["parent"])
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt from elsewhere ends the process; it is no exception
    sys.path[:] = dict.fromkeys([*order["first"], *sys.path, *order["last"]])
    box, hint = (None if limits is None else _beside("sandbox_runner")), ""
    try:
        if box is not None:
            hint = box.shut(order["outside"], order["user"], order["first"])
        if "programs" in order:
            serve_programs(box, limits, calls, answers)
        elif "environment" in order:
            if box is not None:
                box.limit(limits, lasts=True)
            serve_episodes(order["environment"], calls, answers)
        else:
            serve_functions(order, box, calls, answers)
    except ValueError as error:
        _send(answers, f"{error}{hint}")


if __name__ == "__main__":
    main()
