"""Calls of users' functions in a child process."""

import base64
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from pydantic import JsonValue

from infra.processes.child import Child, Interpreter, check_answer, invalid_answer


@dataclass(frozen=True, slots=True)
class RunFunction:
    """Function that the child process imports."""

    target: str
    """Import string of the function, `pkg.mod:function`."""
    where: str
    """Text with which error messages about the function start."""
    options: Mapping[str, JsonValue] = field(default_factory=dict)
    """Keyword arguments of every call."""
    part: str = ""
    """Name of the parameter with the list of parts to score, or an empty string if the function scores the whole."""
    made: bool = False
    """Whether the target is a factory, which is called with the options alone and returns the function."""


@dataclass(frozen=True, slots=True)
class CallResult:
    """Result of a call: one number or a list of numbers, or None with the reason of the failure."""

    value: float | tuple[float, ...] | None
    reason: str | None
    seconds: float


class FunctionProcess:
    """Running child process with its functions."""

    def __init__(
        self, functions: Sequence[RunFunction], interpreter: Interpreter, *, what: str, seconds: float
    ) -> None:
        """Start the process. `seconds` is the maximum time of a call. Call `ready` to wait for the process."""
        order: dict[str, JsonValue] = {"functions": [asdict(function) for function in functions]}
        self._child = Child(order, interpreter, what=what, seconds=seconds)
        self._functions = len(functions)
        self._takes: tuple[frozenset[str], ...] = ()

    def ready(self) -> None:
        """Wait until the functions are imported. Raises BadInput if they cannot be used, and ProcessEnded if the
        process ends."""
        description = self._child.ready()
        takes = tuple(frozenset(map(str, each)) for each in description if isinstance(each, list))
        if len(takes) != len(description) or len(takes) != self._functions:
            raise invalid_answer()
        self._takes = takes

    def kill(self) -> None:
        """Kill the process with its process group and descendants."""
        self._child.kill()

    def takes(self, function: int, name: str) -> bool:
        """Whether a function has a parameter with this name, `images` or `messages`. Only known once the process is
        ready."""
        return name in self._takes[function]

    def call(
        self,
        function: int,
        *arguments: str,
        seconds: float,
        named: Mapping[str, list[str]],
        expected: int | None,
        images: Sequence[bytes] = (),
        messages: Sequence[Mapping[str, object]] = (),
    ) -> CallResult:
        """Call a function that returns one number (`expected` is None), or a list of `expected` numbers (-1: any
        length).

        Raises ProcessEnded if the process ended or was too slow. The process cannot be used afterwards.
        """
        token = secrets.token_hex(8)
        request = {
            "token": token,
            "function": function,
            "arguments": arguments,
            "named": named,
            "images": [base64.b64encode(image).decode() for image in images],
            "messages": [*messages],
            "expected": expected,
        }
        answer, spent = self._child.exchange(request, seconds)
        return _read_result(answer, token, expected, spent)


def _read_result(answer: object, token: str, expected: int | None, seconds: float) -> CallResult:
    value, reason = check_answer(answer, token)
    if reason is not None:
        return CallResult(None, reason, seconds)
    numbers, count = ([value], 1) if expected is None else (value, expected)
    if not isinstance(numbers, list) or (len(numbers) != count >= 0):
        raise invalid_answer()
    if not all(isinstance(number, float) and math.isfinite(number) for number in numbers):
        raise invalid_answer()
    return CallResult(numbers[0] if expected is None else tuple(numbers), None, seconds)
