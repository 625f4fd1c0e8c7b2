"""Calls of users' functions in a child process."""

import base64
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from pydantic import JsonValue

from rheostat.infra.plain_values import shorten_feedback
from rheostat.infra.processes.child import Child, Interpreter, check_answer, invalid_answer


@dataclass(frozen=True, slots=True)
class RunFunction:
    """Description of a user's function that the child process imports."""

    target: str
    """Import string of the function, `pkg.mod:function`."""
    where: str
    """Start of error messages about the function, such as the name of a setting."""
    options: Mapping[str, JsonValue] = field(default_factory=dict)
    """Keyword arguments that are passed in every call."""
    part: str = ""
    """Name of the function's parameter that receives the list of parts (such as steps), if the function scores parts
    separately. Empty if the function scores the whole completion."""
    made: bool = False
    """Whether the target is a factory. A factory is called once with the options, and returns the function to use."""
    has_feedback: bool = False
    """Whether the function returns a number and a text instead of one number."""


@dataclass(frozen=True, slots=True)
class CallResult:
    """Result of calling a user's function: a number or a list of numbers. If the call failed, the value is None and
    `reason` explains the failure."""

    value: float | tuple[float, ...] | None
    reason: str | None
    seconds: float
    feedback: str = ""
    """Text that the function returned with the number. Empty if there is none."""


class FunctionProcess:
    """Child process that imports users' functions and calls them on request."""

    def __init__(
        self, functions: Sequence[RunFunction], interpreter: Interpreter, *, what: str, seconds: float
    ) -> None:
        """Start the process without waiting for its imports. `seconds` is the time limit of a call."""
        order: dict[str, JsonValue] = {"functions": [asdict(function) for function in functions]}
        self._child = Child(order, interpreter, what=what, seconds=seconds)
        self._functions = tuple(functions)
        self._takes: tuple[frozenset[str], ...] = ()

    def ready(self) -> None:
        """Wait until the process has imported the functions. Raises BadInput if they cannot be used, and ProcessEnded
        if the process ends."""
        description = self._child.ready()
        takes = tuple(frozenset(map(str, each)) for each in description if isinstance(each, list))
        if len(takes) != len(description) or len(takes) != len(self._functions):
            raise invalid_answer()
        self._takes = takes

    def kill(self) -> None:
        """Kill the process, its process group and its descendants."""
        self._child.kill()

    def takes(self, function: int, name: str) -> bool:
        """Return whether the function with this index has a parameter named `name`, which is `images` or `messages`.
        The process must be ready."""
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
        """Call the function with the index `function`. `expected` is None if it must return one number, otherwise the
        length of the list that it must return (-1: any length). `seconds` is the time limit.

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
        return _read_result(answer, token, expected, seconds=spent, has_feedback=self._functions[function].has_feedback)


def _read_result(answer: object, token: str, expected: int | None, *, seconds: float, has_feedback: bool) -> CallResult:
    value, reason = check_answer(answer, token)
    if reason is not None:
        return CallResult(None, reason, seconds)
    feedback: object = ""
    if has_feedback:
        value, feedback = value if isinstance(value, list) and len(value) == 2 else (value, None)
    if not isinstance(feedback, str) or feedback != shorten_feedback(feedback):
        raise invalid_answer()
    numbers, count = ([value], 1) if expected is None else (value, expected)
    if not isinstance(numbers, list) or (len(numbers) != count >= 0):
        raise invalid_answer()
    if not all(isinstance(number, float) and math.isfinite(number) for number in numbers):
        raise invalid_answer()
    return CallResult(numbers[0] if expected is None else tuple(numbers), None, seconds, feedback)
