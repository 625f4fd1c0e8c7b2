"""Execution of programs that a policy generated. Each program runs separately in a sandbox
(infra/processes/sandbox.py).

A program consists of arguments for Python, files and an input. It can use the packages that are installed for this
Python, but cannot access data of earlier programs. If a program fails, the failure is part of its result: an exception,
a timeout, too much output or memory, or a killed process. Only failures of the sandbox itself are raised as errors.
"""

import math
import secrets
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

from pydantic import JsonValue, TypeAdapter, ValidationError

from rheostat.infra.errors import WorkerLost
from rheostat.infra.processes.child import (
    MAX_ENDS,
    Child,
    Interpreter,
    ProcessEnded,
    check_answer,
    invalid_answer,
)
from rheostat.infra.processes.restarting import RestartingProcess
from rheostat.infra.processes.sandbox import check_sandbox, program_limits, query_python
from rheostat.infra.sandbox_runner import KILLED, STOPPED


@dataclass(frozen=True, slots=True)
class Program:
    """Python program to run in a sandbox: the command-line arguments for Python, the files in its working directory,
    and its stdin."""

    arguments: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    input: str = ""
    shows_errors: bool = False
    """Whether the recorded output of the program also contains its stderr."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """Result of running a program that a policy generated, in a sandbox."""

    output: str
    """Output of the program. If the program wrote too much, the end is missing."""
    ending: str
    """Description of how the program failed. Empty if it ended normally with exit code 0."""
    seconds: float = 0.0
    is_late: bool = False
    """Whether the program was stopped because it exceeded its time limit."""


class SandboxFailed(Exception):
    """Raised when the sandbox could not run a program for a reason that the program did not cause."""


_RESULT = TypeAdapter(ProgramResult)
_GRACE_SECONDS: Final = 1.0
"""Seconds by which a program may exceed its time limit before it is stopped. If it has not stopped after the same time
again, its sandbox is killed."""


class ProgramProcess:
    """Running sandbox that executes programs, one after another."""

    def __init__(self, python: Path | None, *, where: str, seconds: float, memory_bytes: int) -> None:
        """Start the sandbox. `seconds` and `memory_bytes` limit the time and the memory of each program."""
        limits = program_limits(seconds, memory_bytes=memory_bytes)
        order: dict[str, JsonValue] = {"programs": True, "limits": dict(limits)}
        self._child = Child(order, _interpreter(python, where=where), what=where, seconds=seconds)

    def ready(self) -> None:
        """Wait until the sandbox can run programs. Raises BadInput if it cannot work on this machine, and ProcessEnded
        if it ends."""
        self._child.ready()

    def kill(self) -> None:
        """Kill the sandbox and all processes in it."""
        self._child.kill()

    def run(self, program: Program, *, seconds: float) -> ProgramResult:
        """Run a program in the sandbox and return its result. `seconds` is the time limit. Raises ProcessEnded if the
        sandbox ended, and SandboxFailed if it could not run the program."""
        token, cpu = secrets.token_hex(8), math.ceil(seconds)
        request = {"token": token, "cpu": cpu, **asdict(program)}
        answer, seconds_used = self._child.exchange(request, cpu + _GRACE_SECONDS, stop_seconds=_GRACE_SECONDS)
        result, reason = check_answer(answer, token)
        if reason is not None:
            raise SandboxFailed(reason)
        try:
            ran = _RESULT.validate_python({**result, "seconds": seconds_used} if isinstance(result, dict) else result)
        except ValidationError:
            raise invalid_answer() from None
        return ran


def _interpreter(python: Path | None, *, where: str) -> Interpreter:
    """Return an interpreter for sandboxed programs, which has no access to users' folders. `python` is its executable,
    and `where` names the setting in messages. Raises BadInput if the interpreter or the sandbox is not available."""
    check_sandbox(where)
    program = sys.executable if python is None else query_python(python, where=f"{where}: python")[0]
    return Interpreter(program, (), (), sandboxed=True)


class Programs:
    """Runner of sandboxed programs, one after another. The sandbox is started when it is needed, and started again
    after it has ended."""

    def __init__(self, python: Path | None, *, where: str, seconds: float, memory_bytes: int) -> None:
        self._where, self._seconds = where, seconds
        self._late = f"it took longer than {seconds:g} s"
        self._place = RestartingProcess(
            lambda: ProgramProcess(python, where=where, seconds=seconds, memory_bytes=memory_bytes), what=where
        )

    def start(self) -> None:
        """Start the sandbox in which the programs run. Raises BadInput if the sandbox is not available on this
        machine."""
        self._place.ready()

    def close(self) -> None:
        """Kill the sandbox and all programs in it."""
        self._place.close()

    def run(self, program: Program, *, seconds: float | None = None) -> ProgramResult:
        """Run a program and return its result. `seconds` limits the time of the program (default: the limit of the
        runner).

        Raises SandboxFailed if the sandbox could not run the program, and WorkerLost if the sandbox ended `MAX_ENDS`
        times in a row for unknown reasons.
        """
        longest, ends = self._seconds if seconds is None else seconds, list[str]()
        while True:
            try:
                ran = self._place.ready().run(program, seconds=longest)
                late = ran.ending in (STOPPED, f"{KILLED}SIGXCPU")
                return replace(ran, ending=self._late, is_late=True) if late else ran
            except ProcessEnded as end:
                self._place.close()
                ends.append(end.cause)
                if end.num_repeats is not None and ends.count(end.cause) >= end.num_repeats:
                    late = end.cause == "time"
                    return ProgramResult("", self._late if late else str(end), seconds=longest, is_late=late)
                if len(ends) == MAX_ENDS:
                    raise WorkerLost(
                        f"{self._where}: the sandbox ended {len(ends)} times in a row ({', '.join(ends)}), and the "
                        "cause is "
                        "unknown. Check that the machine has enough memory and that nothing kills the process."
                    ) from end
            except BaseException:
                self._place.close()  # the next call must not read a late response of this call
                raise
