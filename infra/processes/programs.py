"""Programs that a policy wrote, each run by itself in a sandbox (infra/processes/sandbox.py).

A program is a Python's arguments, files and an input. It finds that Python and what is installed there, and nothing of
an earlier program. Whatever it does is its own doing and told as its ending: to raise, to take too long or too much, to
end what runs it. Only what the sandbox itself cannot do is none of its doing.
"""

import math
import secrets
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

from pydantic import JsonValue, TypeAdapter, ValidationError

from infra.errors import WorkerLost
from infra.processes.child import MOST_ENDS, Child, Interpreter, Place, ProcessEnded, checked, meddled
from infra.processes.sandbox import asked, check_sandbox, program_limits
from infra.sandbox_runner import KILLED, STOPPED


@dataclass(frozen=True, slots=True)
class Program:
    """What a Python is given; the files lie in its working directory."""

    arguments: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    input: str = ""
    shows_errors: bool = False
    """Whether what it writes to stderr belongs to its output."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What a program did."""

    output: str
    """What it wrote, or the beginning of it."""
    ending: str
    """How it ended, in words; empty where it ended by itself with exit code 0."""
    seconds: float = 0.0
    is_late: bool = False
    """Whether it was ended since it took too long."""


class SandboxFailed(Exception):
    """The sandbox could not run a program, which is not the program's doing."""


_RAN = TypeAdapter(Ran)
_GRACE_SECONDS: Final = 1.0
"""Time that a program may take beyond its processor time before it is stopped, and that stopping it may take before
its sandbox is killed with it."""


class ProgramProcess:
    """A running sandbox."""

    def __init__(self, python: Path | None, *, where: str, seconds: float, memory_bytes: int) -> None:
        """Start it; a program may take so long, and so much memory."""
        limits = program_limits(seconds, memory_bytes=memory_bytes)
        order: dict[str, JsonValue] = {"programs": True, "limits": dict(limits)}
        self._child = Child(order, _interpreter(python, where=where), what=where, seconds=seconds)

    def ready(self) -> None:
        """Wait until programs can be run. Raises BadInput if they never can, else ProcessEnded."""
        self._child.ready()

    def kill(self) -> None:
        """Kill the sandbox with all that runs in it."""
        self._child.kill()

    def run(self, program: Program, *, seconds: float) -> Ran:
        """Run a program. Raises ProcessEnded if the sandbox is gone, SandboxFailed if it could not run the program."""
        token, cpu = secrets.token_hex(8), math.ceil(seconds)
        request = {"token": token, "cpu": cpu, **asdict(program)}
        answer, spent = self._child.exchange(request, cpu + _GRACE_SECONDS, stop_seconds=_GRACE_SECONDS)
        found, reason = checked(answer, token)
        if reason is not None:
            raise SandboxFailed(reason)
        try:
            ran = _RAN.validate_python({**found, "seconds": spent} if isinstance(found, dict) else found)
        except ValidationError:
            raise meddled() from None
        return ran


def _interpreter(python: Path | None, *, where: str) -> Interpreter:
    """Say what runs programs: a Python in a sandbox in which no folder of a user is. Raises BadInput."""
    check_sandbox(where)
    program = sys.executable if python is None else asked(python, where=f"{where}: python")[0]
    return Interpreter(program, (), (), sandboxed=True)


class Programs:
    """Runs programs one after another; the sandbox is started when it is needed, and again whenever it is gone."""

    def __init__(self, python: Path | None, *, where: str, seconds: float, memory_bytes: int) -> None:
        self._where, self._seconds = where, seconds
        self._late = f"it took longer than {seconds:g} s"
        self._place = Place(
            lambda: ProgramProcess(python, where=where, seconds=seconds, memory_bytes=memory_bytes), what=where
        )

    def start(self) -> None:
        """Start the sandbox. Raises BadInput if it cannot be had."""
        self._place.ready()

    def close(self) -> None:
        """Kill the sandbox."""
        self._place.close()

    def run(self, program: Program, *, seconds: float | None = None) -> Ran:
        """Run a program, for so long at most where less than all of its time is left.

        Raises SandboxFailed where the sandbox could not, WorkerLost where others killed it time after time.
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
                if end.suffices is not None and ends.count(end.cause) >= end.suffices:
                    late = end.cause == "time"
                    return Ran("", self._late if late else str(end), seconds=longest, is_late=late)
                if len(ends) == MOST_ENDS:
                    raise WorkerLost(
                        f"{self._where}: its sandbox was ended {len(ends)} times in a row, by {', '.join(ends)}. Who "
                        "did it is not known: see that the machine has the memory, and that nothing kills the process"
                    ) from end
            except BaseException:
                self._place.close()  # an answer of this call may still come; the next call must not read it
                raise
