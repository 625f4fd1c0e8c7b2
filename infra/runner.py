"""Main program of the process that runs users' functions. It imports nothing from Rheostat.

The file is run by the interpreter that the user chose (CPython 3.9 or newer), and the user's folders come first on its
module path. It receives an order with the code to load. It reports whether the functions can be used, with the problem
or with the functions that accept images. Then it responds to each call with `[token, value, reason, end]`. `reason`
explains a missing value. `end` describes how the process of a call ended without returning a value. A frame consists of
four bytes with the length of the JSON that follows. Only frames are sent through the original stdin and stdout, which
functions cannot access.
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

MIN_PYTHON = (3, 9)
"""Oldest Python version that can run this file."""
FILES = ("runner.py", "agent_runner.py", "episode_runner.py", "plain_values.py", "sandbox_runner.py")
"""Names of the files that a child process of users' code reads from the folder of this file."""
LENGTH_BYTES = 4
MAX_RESPONSE_BYTES = 1 << 24
STOP = "stop"
"""Message from the parent process that stops the running program. The response then contains the output so far."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class InvalidTarget(ValueError):
    """Raised when an object that the user named in a setting cannot be imported, or does not accept the required
    arguments."""


def import_sibling(name: str) -> ModuleType:
    """Import a Python file from the folder that contains this file. This folder is not on the module path of users'
    functions."""
    spec = importlib.util.spec_from_file_location(f"rheostat_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None, "the file exists"
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


plain_values: Any = import_sibling("plain_values")


# ---- finding the objects that users name


def import_target(target: str, where: str) -> object:
    """Import the object that the import string `pkg.mod:attribute` names, and return it. Raises InvalidTarget if it
    cannot be imported. The message starts with `where` and suggests the most similar name."""
    module_name, _, path = target.partition(":")
    found: object = _module(module_name, where)
    for name in path.split("."):
        if not hasattr(found, name):
            what = plain_values.describe_value(found)
            raise InvalidTarget(f"{where}: {what} has no attribute {name!r}{nearest_name(name, dir(found))}")
        found = getattr(found, name)
    return found


def check_call(
    function: Callable[..., object], *parameters: str, where: str, named: Mapping[str, object] | None = None
) -> None:
    """Raise InvalidTarget unless a function can be called with these parameters. Parameters in `named` are passed by
    keyword. The message starts with `where`."""
    options = named or {}
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-ins have no signature, so the call itself will show it
        return
    try:
        signature.bind(*parameters, **options)
    except TypeError as error:
        wanted = ", ".join((*parameters, *(f"{name}=…" for name in options)))
        raise InvalidTarget(
            f"{where} is called with the arguments ({wanted}), but its parameters are {signature}: {error}. Change "
            "the function or its options"
        ) from error


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Return the text `, did you mean 'x'?` with the known name that is most similar to `name`, or an empty string if
    no known name is similar."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {near[0]!r}?" if near else ""


def _module(name: str, where: str) -> object:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise InvalidTarget(
                f"{where}: the module imports {error.name!r}, which is not installed. Install it in the environment of "
                "the Python that runs this module."
            ) from error
        raise InvalidTarget(
            f"{where}: there is no module {error.name!r} in the environment or next to the configuration file"
            f"{nearest_name(error.name, _siblings(error.name))}"
        ) from error
    except (Exception, SystemExit) as error:  # any error of a user's module means that it cannot be used
        raise InvalidTarget(
            f"{where}: importing the module failed with {type(error).__name__}: {error}. Correct the module."
        ) from error


def _siblings(name: str) -> Iterable[str]:
    parent, _, _ = name.rpartition(".")
    if not parent:
        return (module.name for module in pkgutil.iter_modules())
    folders = getattr(importlib.import_module(parent), "__path__", ())
    return (f"{parent}.{module.name}" for module in pkgutil.iter_modules(folders))


# ---- return values of functions


def compute_value(
    call: Callable[[], object], expected: int | None, part: str, *, has_feedback: bool = False
) -> tuple[float | list[float] | tuple[float, str] | None, str | None]:
    """Call a user's function, and return (value, None), or (None, reason) if the call failed. `expected` is None if the
    function must return one number, otherwise the length of the list that it must return (-1: any length). `part` names
    the list's elements in messages. If `has_feedback` is true, the function must return a number and a text.

    Every exception of the function counts as a failed call.
    """
    try:
        result = call()
        if has_feedback:
            return _number_and_text(result), None
        return (_number(result) if expected is None else _numbers(result, part, expected)), None
    except plain_values.InvalidValue as error:
        return None, one_line(str(error))
    except BaseException as error:  # also KeyboardInterrupt, which only the function itself can raise
        return None, one_line(f"{type(error).__name__}: {message_of(error)}")


def one_line(message: str) -> str:
    """Return a message as one line of at most 200 characters, with memory addresses masked.

    The message is stored in a shard. Therefore the same inputs must give the same message.
    """
    masked = re.sub(r"\b0x[0-9a-f]+", "0x…", " ".join(message.split()))
    return masked[:200].encode("utf-8", "replace").decode()


def message_of(error: BaseException) -> str:
    """Return the message of an exception of users' code."""
    try:
        return str(error)
    except BaseException:
        return "the error has no readable message"


def _number(result: object) -> float:
    number: float = plain_values.to_number(result)
    return number


def _number_and_text(result: object) -> tuple[float, str]:
    if not isinstance(result, (tuple, list)) or len(result) != 2 or not isinstance(result[1], str):
        raise plain_values.InvalidValue(
            "expected a float and a text, because `feedback` of this reward is true, found "
            + plain_values.describe_value(result)
        )
    return _number(result[0]), plain_values.shorten_feedback(result[1])


def _numbers(result: object, part: str, expected: int) -> list[float]:
    wanted = f"expected {expected} floats, one for each of the {part}"
    is_single = isinstance(result, (str, bytes, Mapping)) or plain_values.has_no_dimensions(result)
    if is_single or not isinstance(result, Iterable):
        raise plain_values.InvalidValue(f"{wanted}, found {plain_values.describe_type(result)}")
    values = [_number(value) for value in (islice(result, expected + 1) if expected >= 0 else result)]
    if len(values) != expected >= 0:
        more = "more" if len(values) > expected else str(len(values))
        raise plain_values.InvalidValue(f"{wanted}, found {more}")
    return values


# ---- the process


def frame(content: object) -> bytes:
    """Encode a message for the pipe: the length of its JSON text, followed by the text."""
    body = json.dumps(content).encode()
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def _receive(stream: BinaryIO) -> Any:  # noqa: ANN401 - JSON that ours has written
    """Read one message from the pipe, and return its content. Return None at the end of the pipe."""
    head = stream.read(LENGTH_BYTES)
    return json.loads(stream.read(int.from_bytes(head, "big"))) if len(head) == LENGTH_BYTES else None


def send(pipe: int, content: object) -> None:
    """Write a message to a pipe."""
    write(pipe, frame(content))


def write(pipe: int, content: bytes) -> None:
    """Write all bytes to a pipe."""
    left = memoryview(content)
    while left:
        left = left[os.write(pipe, left) :]


def _load(function: Mapping[str, Any]) -> tuple[Callable[..., object], list[str]]:
    """Import a user's function and check its parameters. Return the function with its options bound, and the names of
    the additional parameters (`images`, `messages`) that it accepts.

    The function must accept prompt, completion, answer, the options, and the parameter for parts if it has one. Raises
    InvalidTarget if it does not.
    """
    where, target, options, part = (function[name] for name in ("where", "target", "options", "part"))
    forget(target.partition(":")[0].partition(".")[0])
    found = import_target(target, where)
    if not callable(found) or inspect.iscoroutinefunction(found):
        what = plain_values.describe_value(found)
        raise InvalidTarget(
            f"{where} must be a function (not async) that returns a float or a list of floats, found {what}"
        )
    if function["made"]:
        function_made: Callable[..., object] = found(**options)
        return function_made, _extra_parameters(function_made)
    named = {part: [], **options} if part else options
    takes = [name for name in _extra_parameters(found) if name not in named]
    named = {**{name: [] for name in takes}, **named}
    check_call(found, "prompt", "completion", "answer", where=where, named=named)
    return functools.partial(found, **options), takes


def _extra_parameters(function: Callable[..., object]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some built-ins have no signature
        return []
    return [name for name in ("images", "messages") if name in parameters]


def forget(name: str) -> None:
    """Unload a module if the user has another module of the same name, so that the next import loads the user's
    module."""
    loaded = getattr(sys.modules.get(name), "__spec__", None)
    if loaded is not None and loaded.has_location:
        before = sys.modules.pop(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin == loaded.origin:
            sys.modules[name] = before


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent process `parent` ends, even if this process hangs or is
    suspended (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call
        os._exit(1)


def serve_episodes(order: Mapping[str, Any], calls: BinaryIO, answers: int) -> None:
    """Load the environment or tools that `order` describes, then respond to turns of episodes until the pipe is closed.
    Requests are read from `calls`, and responses are written to the file descriptor `answers`. Raises ValueError if the
    environment or tools cannot be used."""
    episodes_module = import_sibling("episode_runner")
    make, tools = _environment(order, episodes_module.ToolBox)
    describes = order["describes"]
    schemas = [] if describes == "none" else episodes_module.build_schemas(tools, skip_unknown=describes == "known")
    send(answers, schemas)
    episodes = episodes_module.LiveEpisodes(make, order["role"])
    while (call := _receive(calls)) is not None:
        try:
            episodes.close(call["closed"])
            step, reason = episodes.step(call) if call["episode"] else None, None
        except BaseException as error:  # any error of an environment is reported as its result
            step, reason = None, one_line(f"{type(error).__name__}: {message_of(error)}")
        send(answers, [call["token"], step, reason, None])


def _environment(order: Mapping[str, Any], tool_box: Callable[..., object]) -> tuple[Callable[[], object], list[Any]]:
    """Return a function that creates the environment of one episode, and the tools that the policy can call. `order`
    describes the environment, and `tool_box` creates an environment that consists only of tools.

    Raises InvalidTarget if the environment or tools cannot be imported or called.
    """
    where, options = order["where"], order["options"]
    for target in (order["target"], *order["tools"]):
        forget(target.partition(":")[0].partition(".")[0])
    if not order["target"]:
        tools = [import_target(tool, f"tool {tool!r}") for tool in order["tools"]]
        for tool in tools:
            if not callable(tool):
                raise InvalidTarget(
                    f"{where}: every tool must be a function, found {plain_values.describe_value(tool)}"
                )
        return (lambda: tool_box(tools)), tools
    found = import_target(order["target"], where)
    if not callable(found) or not callable(getattr(found, "step", None)):
        raise InvalidTarget(
            f"{where} must be a class with a method step(turn), found {plain_values.describe_value(found)}"
        )
    check_call(found, where=where, named=options)
    offered: Any = getattr(found, "tools", ())
    if callable(offered):  # tools of a server, which may take time to start and list its tools
        try:
            offered = offered(**options)
        except ValueError:
            if order["describes"] == "all":
                raise
            offered = ()  # the server may be available again when it is needed
    return functools.partial(found, **options), [*offered]


def serve_programs(box: Any, limits: Mapping[str, int], calls: BinaryIO, answers: int) -> None:  # noqa: ANN401
    """Run the programs that the parent process requests, one after another. Requests are read from `calls`, and results
    are written to the file descriptor `answers`. `box` is the module sandbox_runner."""
    send(answers, [])
    while (call := _receive(calls)) is not None:
        if call == STOP:  # the program to be stopped has already ended
            continue
        try:
            result, reason = box.run_program(call, limits, (calls.fileno(), answers)), None
        except OSError as error:  # an error of the sandbox, because a program cannot raise here
            result, reason = None, one_line(f"{type(error).__name__}: {error}")
        send(answers, [call["token"], result, reason, None])


def _write_result(compute: Callable[[], object], pipe: int) -> None:
    write(pipe, json.dumps(compute()).encode())


def serve_functions(order: Mapping[str, Any], box: ModuleType | None, calls: BinaryIO, answers: int) -> None:
    """Load the functions that `order` describes, then call them for each request until the pipe is closed. Requests are
    read from `calls`, and results are written to the file descriptor `answers`. If `box` (the module sandbox_runner) is
    given, each call runs in a forked process. Raises ValueError if a function cannot be used."""
    functions = [_load(function) for function in order["functions"]]
    send(answers, [takes for _, takes in functions])
    while (call := _receive(calls)) is not None:
        function, takes = functions[call["function"]]
        extras = {"images": [base64.b64decode(image) for image in call["images"]], "messages": call["messages"]}
        extra_arguments = {name: extras[name] for name in takes}
        bound = functools.partial(function, *call["arguments"], **call["named"], **extra_arguments)
        has_feedback = order["functions"][call["function"]]["has_feedback"]
        compute = functools.partial(
            compute_value, bound, call["expected"], "".join(call["named"]), has_feedback=has_feedback
        )
        if box is None:
            result = [*compute(), None]
        else:
            hidden = calls.fileno(), answers
            body = functools.partial(_write_result, compute)
            result = box.decode_result(
                *box.run_in_fork(body, order["limits"], max_bytes=MAX_RESPONSE_BYTES, hidden=hidden)
            )
        send(answers, [call["token"], *result])


def main() -> None:
    """Run the child process: read the first message, which describes the code to load, and then respond to requests
    until the pipe is closed."""
    calls, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # output of functions
    order = _receive(calls)
    limits = order["limits"]
    if order["parent"] is None:  # in a container
        import_sibling("sandbox_runner").protect_process()
    elif limits is None:
        die_with_parent(order["parent"])
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # an interrupt from elsewhere ends the process without an exception
    sys.path[:] = dict.fromkeys([*order["first"], *sys.path, *order["last"]])
    box, hint = (None if limits is None else import_sibling("sandbox_runner")), ""
    try:
        if box is not None:
            hint = box.isolate(order["outside"], order["user"], order["first"])
        if "programs" in order:
            serve_programs(box, limits, calls, answers)
        elif "agent" in order:
            import_sibling("agent_runner").serve_agents(order["agent"], calls.fileno(), answers)
        elif "environment" in order:
            if box is not None:
                box.limit(limits, lasts=True)
            serve_episodes(order["environment"], calls, answers)
        else:
            serve_functions(order, box, calls, answers)
    except ValueError as error:
        send(answers, f"{error}{hint}")


if __name__ == "__main__":
    main()
