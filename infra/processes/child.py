"""A process of its own in which users' code runs (infra/runner.py), which is lost or killed without harm to ours.

What ends the process says whose doing it was as far as that can be known. Time counts only as far as the process could
have used it: neither while it waits for a processor that others hold, nor while this process stands still itself.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

import psutil
from pydantic import JsonValue

from infra import runner, sandbox_runner
from infra.errors import BadInput, WorkerFailed, WorkerLost
from infra.plugins import target_folders
from infra.processes.clock import CallClock
from infra.processes.sandbox import NOBODY, asked, check_sandbox, limits, start_sandboxed, switches_user
from infra.untrusted_text import visible

START_SECONDS: Final = 120.0
"""Longest time for the process to import its functions; sympy on a busy machine takes about ten."""
STARTS: Final = 3
"""How often a process is started that dies while it imports."""
MOST_ENDS: Final = 4
"""How many processes one call may cost."""
STARVED: Final = 10.0
"""How many times its time a call may take, beside a minute, on a machine that gives it no processor."""
MAX_FRAME: Final = 1 << 24
_EXIT_SECONDS = 1.0  # between the end of a dying process's pipe and its exit code
_HOME = str(Path(__file__).parents[2])
_CRASHES = {"SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL", "SIGSYS", "SIGTRAP", "SIGXCPU", "SIGXFSZ"}
"""Signals that the kernel sends a process for what it has just done."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """What runs the functions: a Python, and where it finds modules before and after those that it has itself."""

    python: str
    first: tuple[str, ...]
    last: tuple[str, ...]
    sandboxed: bool = False


class ProcessEnded(Exception):
    """The process is gone in the middle of a call."""

    def __init__(self, reason: str, *, cause: str, suffices: int | None = 2) -> None:
        super().__init__(reason)
        self.cause = cause
        """By which two ends are compared."""
        self.suffices = suffices
        """So many ends alike are the call's own doing; none: it may always have been somebody else's."""


def our_interpreter() -> Interpreter:
    """Say how functions of ours run: nothing of a user is on their path."""
    here = {"", str(Path.cwd())}
    return Interpreter(sys.executable, (), (_HOME, *(folder for folder in sys.path if folder not in here)))


def users_interpreter(python: Path | None = None, *, sandbox: str = "") -> Interpreter:
    """Say how users' functions run: their folders come first, and, if the Python is ours, all that we have last.

    `sandbox` is the setting that asks for one. Raises BadInput if there is no such Python, or no sandbox.
    """
    program = sys.executable if python is None else asked(python, where="scoring.python")[0]
    if sandbox:
        check_sandbox(sandbox)
    last = () if python else tuple(filter(None, sys.path))
    return Interpreter(program, user_folders(), last, sandboxed=bool(sandbox))


def user_folders() -> tuple[str, ...]:
    """Return the folders in which the processes of users' functions look for modules first."""
    installed = {"site-packages", "dist-packages"}
    prefixes = tuple(Path(prefix) for prefix in (sys.prefix, sys.base_prefix))
    brought = [
        folder
        for folder in (str(Path(entry).absolute()) for entry in sys.path)
        if folder != _HOME
        and not installed & set(Path(folder).parts)
        and not any(Path(folder).is_relative_to(prefix) for prefix in prefixes)
    ]
    here, *named = target_folders()
    return tuple(dict.fromkeys([here, *brought, *named]))


class Child:
    """A running process and the pipes to it. The order that it is given first says what it loads."""

    def __init__(self, order: Mapping[str, JsonValue], interpreter: Interpreter, *, what: str, seconds: float) -> None:
        """Start the process, of which a call may take so long; `ready` waits for it."""
        self._what = what
        self._unread, self._killed = b"", False
        self._sandboxed = interpreter.sandboxed
        command = [interpreter.python, "-I", *(["-B"] if sys.dont_write_bytecode else []), runner.__file__]
        if self._sandboxed:
            folders = (*interpreter.first, *interpreter.last)
            self._process = start_sandboxed(command, folders, stderr=subprocess.DEVNULL)
        else:
            errors = _print_visibly()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                start_new_session=True,  # what functions start is killed with them, and Ctrl-C is the parent's affair
            )
            os.close(errors)
        assert self._process.stdin is not None and self._process.stdout is not None, "they were asked for"
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        self._order = {
            "parent": os.getpid(),
            "first": interpreter.first,
            "last": interpreter.last,
            "limits": limits(seconds) if self._sandboxed else None,
            "user": NOBODY if self._sandboxed and switches_user() else None,
            "outside": str(Path("/proc/self/ns/pid").readlink()) if self._sandboxed else "",
            **order,
        }

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def ready(self) -> list[object]:
        """Wait until all of the order is imported, and return what the process says of it.

        Raises BadInput if it cannot be used, else ProcessEnded.
        """
        try:
            found, _ = self.exchange(self._order, START_SECONDS)
        except ProcessEnded as end:
            if end.cause == "time":
                raise WorkerFailed(f"{self._what}: not imported after {START_SECONDS:g} s") from None
            raise
        if isinstance(found, str):
            raise BadInput(found)
        if not isinstance(found, list):
            raise meddled()
        return found

    def kill(self) -> None:
        """Kill the process with its group and its descendants; once, since its id is free for others afterwards."""
        if self._killed:
            return
        self._killed = True
        with suppress(psutil.Error):
            for each in psutil.Process(self.pid).children(recursive=True):
                with suppress(psutil.Error):
                    each.kill()
        with suppress(ProcessLookupError):  # somebody else has collected it
            os.killpg(self.pid, signal.SIGKILL)
        self._process.communicate()

    def exchange(self, content: object, seconds: float, *, stop_seconds: float = 0.0) -> tuple[object, float]:
        """Send a frame and return the one that comes back, with the time that counts.

        After `seconds` the process is asked to stop what it runs, and has `stop_seconds` to answer with what there is.
        """
        if self._unread or _readable(self._out):
            raise self._end()
        unsent, clock = memoryview(runner.frame(content)), CallClock(self.pid, seconds)
        longest = seconds
        while True:
            unsent, found = self._poll(unsent, clock.slice)
            counted = clock.counted()
            if found is not None:
                return found[0], counted
            if counted > seconds and stop_seconds and not unsent:
                unsent, stop_seconds, longest = memoryview(runner.frame(runner.STOP)), 0.0, seconds + stop_seconds
            elif counted > longest:
                raise self._late(seconds, used=clock.used)
            if clock.lasted > STARVED * seconds + 60:
                raise WorkerLost(
                    f"{self._what}: {clock.lasted:.0f} s for what may take {seconds:g} s, with {clock.used:.0f} s of a "
                    "processor: the machine has too much to do"
                )

    def _poll(self, unsent: memoryview, seconds: float) -> tuple[memoryview, tuple[object] | None]:
        """Wait for a slice of time: send what the pipe takes, and return what is left and the frame that has come."""
        polled = select.poll()
        polled.register(self._out, select.POLLIN)
        if unsent:
            polled.register(self._in, select.POLLOUT)
        ready = dict(polled.poll(seconds * 1000))
        if self._in in ready:
            try:
                unsent = unsent[os.write(self._in, unsent) :]
            except BrokenPipeError:  # how it ended is read from the other pipe
                unsent = unsent[:0]
        found = None
        if self._out in ready:
            read = os.read(self._out, 1 << 16)
            self._unread += read
            found = self._frame()
            if found is None and not read:
                raise self._end()
        elif not ready and self._exit() is not None:  # what it started may hold the pipe open
            raise self._end()
        return unsent, found

    def _frame(self) -> tuple[object] | None:
        """Take a frame from what was read, if it is whole. Raises ProcessEnded where it is none of the runner's."""
        size = int.from_bytes(self._unread[: runner.LENGTH_BYTES], "big")
        whole = runner.LENGTH_BYTES + size
        if len(self._unread) < runner.LENGTH_BYTES or (size <= MAX_FRAME and len(self._unread) < whole):
            return None
        body, more = self._unread[runner.LENGTH_BYTES : whole], self._unread[whole:]
        if size > MAX_FRAME or more:
            raise meddled()
        self._unread = b""
        try:
            return (json.loads(body),)
        except (ValueError, RecursionError):
            raise meddled() from None

    def _late(self, seconds: float, *, used: float) -> ProcessEnded:
        """Say why there is no value yet: a process that somebody has stopped is not slow."""
        with suppress(psutil.Error):
            if not self._sandboxed and psutil.Process(self.pid).status() == psutil.STATUS_STOPPED:
                return ProcessEnded("its process was stopped", cause="SIGSTOP", suffices=None)
        return ProcessEnded(f"no value after {seconds:g} s", cause="time", suffices=1 if used > seconds / 2 else 2)

    def _end(self) -> ProcessEnded:
        """Say how the process ended."""
        if self._unread or _readable(self._out):
            return meddled()
        deadline = time.monotonic() + _EXIT_SECONDS
        while (code := self._exit()) is None:
            if time.monotonic() > deadline:
                return ProcessEnded("its process closed the pipe", cause="own")
            time.sleep(_EXIT_SECONDS / 100)
        if self._sandboxed and code > 128:  # as shells tell of a signal that came inside
            return _killed(sandbox_runner.signal_name(code - 128), inside=True)
        if code >= 0:
            return ProcessEnded(f"its process ended with exit code {code}", cause="own")
        return _killed(sandbox_runner.signal_name(-code))

    def _exit(self) -> int | None:
        """Return the exit code, or the signal below 0; on Linux the process keeps its id until it is killed here."""
        if sys.platform != "linux":
            return self._process.poll()
        try:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # somebody else has collected it
            return 0
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _print_visibly() -> int:
    """Return a pipe for what functions print; a thread copies it to stderr with all of its characters visible."""
    read, write = os.pipe()

    def copy() -> None:
        with os.fdopen(read, "rb") as printed:
            for line in iter(partial(printed.readline, 1 << 16), b""):
                sys.stderr.write(visible(line.decode(errors="replace")))
                sys.stderr.flush()

    threading.Thread(target=copy, name="printed by functions", daemon=True).start()
    return write


def _readable(pipe: int) -> bool:
    """Whether more than the pipe's end can be read."""
    polled = select.poll()
    polled.register(pipe, select.POLLIN)
    return any(event & select.POLLIN for _, event in polled.poll(0))


def _killed(name: str, *, inside: bool = False) -> ProcessEnded:
    """Say that a signal ended a process, which never is the call's doing unless the kernel sends it for what was done.

    Whatever runs `inside` a sandbox may end its own process, and nobody vouches for it.
    """
    suffices = 2 if name in _CRASHES else MOST_ENDS if inside else None
    return ProcessEnded(f"{sandbox_runner.KILLED}{name}", cause=name, suffices=suffices)


def meddled() -> ProcessEnded:
    """Say that what came through the pipe is none of the runner's answers."""
    return ProcessEnded("its process wrote what is no answer", cause="own")


def checked(answer: object, token: str) -> tuple[object, str | None]:
    """Read an answer as data, since the process may have written anything: a value, or none and the reason.

    Raises ProcessEnded where the call's own process ended, or the answer is none.
    """
    if not isinstance(answer, list) or len(answer) != 4 or answer[0] != token:
        raise meddled()
    _, value, reason, end = answer
    if isinstance(end, str):
        if end.startswith(sandbox_runner.KILLED):
            raise _killed(runner.one_line(end.removeprefix(sandbox_runner.KILLED)), inside=True)
        raise ProcessEnded(runner.one_line(end), cause="own")
    if isinstance(reason, str) and value is None:
        return None, runner.one_line(reason)
    if reason is not None:
        raise meddled()
    return value, None


class Served(Protocol):
    """What runs in a process."""

    def ready(self) -> None:
        """Wait until it can be used. Raises BadInput if it never can, else ProcessEnded."""

    def kill(self) -> None:
        """Kill the process."""


Process = TypeVar("Process", bound=Served)


class Place(Generic[Process]):
    """A process that is started when it is needed, and again whenever it is gone."""

    def __init__(self, start: Callable[[], Process], *, what: str) -> None:
        self._start, self._what = start, what
        self._process: Process | None = None
        self._is_ready = False

    @property
    def is_up(self) -> bool:
        """Whether there is a process that is ready, as far as is known."""
        return self._process is not None and self._is_ready

    def start(self) -> None:
        """Start the process, if there is none."""
        if self._process is None:
            self._process = self._start()
            self._is_ready = False

    def ready(self) -> Process:
        """Return the process with its code imported; one that dies meanwhile is started again."""
        for attempt in range(STARTS):
            self.start()
            assert self._process is not None, "it was started"
            if self._is_ready:
                break
            try:
                self._process.ready()
                self._is_ready = True
                break
            except ProcessEnded as end:
                self.close()
                if attempt + 1 == STARTS:
                    raise WorkerFailed(f"{self._what}: while importing them, {end} ({STARTS} times)") from None
            except BaseException:
                self.close()
                raise
        assert self._process is not None, "it is ready"
        return self._process

    def close(self) -> None:
        """Kill the process and what it started, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process = None
