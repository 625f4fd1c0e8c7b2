"""Child process that runs users' code (infra/runner.py), so that a crash of this code does not affect the parent
process.

If a child ends unexpectedly, this module tries to determine whether the user's code is the cause. The time limit of a
call only covers time in which the child could run. Time in which other processes use the CPUs, or in which the parent
process is suspended, does not count.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import psutil
from pydantic import JsonValue

from rheostat.infra import runner, sandbox_runner
from rheostat.infra.errors import BadInput, WorkerFailed, WorkerLost
from rheostat.infra.former_names import HOME
from rheostat.infra.plugins import target_folders
from rheostat.infra.processes.clock import CallClock
from rheostat.infra.processes.containers import Container, start_contained
from rheostat.infra.processes.sandbox import (
    NOBODY,
    call_limits,
    check_sandbox,
    query_python,
    start_sandboxed,
    switches_user,
)
from rheostat.infra.untrusted_text import make_visible

START_SECONDS: Final = 120.0
"""Maximum seconds for a child process to import users' functions. sympy alone takes 10 s on a busy machine."""
MAX_ENDS: Final = 4
"""Maximum number of attempts for one call if the child process ends during each attempt."""
MAX_SLOWDOWN: Final = 10.0
"""Maximum duration of a call, as a multiple of its limit, which only counts time in which the process could run."""
MAX_FRAME: Final = 1 << 24
EXIT_SECONDS: Final = 1.0
"""Maximum seconds in which a process that has closed its pipe and could run becomes known as ended. The pipe of a
process that dies is closed before its exit code is known."""
_CRASHES = {"SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL", "SIGSYS", "SIGTRAP", "SIGXCPU", "SIGXFSZ"}
"""Names of the signals that the kernel sends to a process because of an error in the process itself."""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """Python executable for users' functions. Its module path starts with `first` and ends with `last`."""

    python: str
    first: tuple[str, ...]
    last: tuple[str, ...]
    sandboxed: bool = False
    container: Container | None = None
    """Containers in which the functions run, with the Python of their image, or None."""

    @property
    def is_isolated(self) -> bool:
        """Whether functions run in a sandbox or in a container."""
        return self.sandboxed or self.container is not None


class ProcessEnded(Exception):
    """Raised when a child process ended during a call, or must be ended because of it."""

    def __init__(self, reason: str, *, cause: str, num_repeats: int | None = 2) -> None:
        super().__init__(reason)
        self.cause = cause
        """Short name of the cause, with which repeated ends for the same cause are recognized."""
        self.num_repeats = num_repeats
        """Number of ends with the same cause after which the call counts as the cause, or None if it never does."""


def rheostat_interpreter() -> Interpreter:
    """Return the interpreter for functions that belong to Rheostat. It does not search users' folders for modules."""
    here = {"", str(Path.cwd())}
    return Interpreter(sys.executable, (), tuple(folder for folder in sys.path if folder not in here))


def user_interpreter(python: Path | None = None, *, sandbox: str = "", where: str = "scoring.python") -> Interpreter:
    """Return the interpreter for users' functions, which searches users' folders for modules first. `python` is its
    executable (default: this process's Python).

    If the interpreter is the Python of this process, it also searches the module path of this process, after its own.

    `sandbox` names the setting that requires a sandbox, and `where` the setting that contains `python`. Raises BadInput
    if the Python or the sandbox is not available.
    """
    program = sys.executable if python is None else query_python(python, where=where)[0]
    if sandbox:
        check_sandbox(sandbox)
    last = () if python else tuple(filter(None, sys.path))
    return Interpreter(program, user_folders(), last, sandboxed=bool(sandbox))


def user_folders() -> tuple[str, ...]:
    """Return the folders that processes of users' functions search first for modules, such as the working directory."""
    installed = {"site-packages", "dist-packages"}
    prefixes = tuple(Path(prefix) for prefix in (sys.prefix, sys.base_prefix))
    added = [
        folder
        for folder in (str(Path(entry).absolute()) for entry in sys.path)
        if Path(folder).resolve() != HOME
        and not installed & set(Path(folder).parts)
        and not any(Path(folder).is_relative_to(prefix) for prefix in prefixes)
    ]
    here, *configured = target_folders()
    return tuple(dict.fromkeys([here, *added, *configured]))


class Child:
    """Child process that runs users' code, with the pipes to exchange messages with it. The first message (`order`)
    tells the process which code to load."""

    def __init__(
        self,
        order: Mapping[str, JsonValue],
        interpreter: Interpreter,
        *,
        what: str,
        seconds: float,
        variables: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
        channel: Path | None = None,
    ) -> None:
        """Start the process without waiting for its imports. `seconds` is the time limit of a call.

        `variables` are the process's environment variables (default: those of this process). A process in a sandbox or
        container gets a fixed environment instead. The process inherits the open files `descriptors`, unless it runs in
        a container, where the directory `channel` is mounted.
        """
        self._what = what
        self._unread, self._killed = b"", False
        self._sandboxed = interpreter.sandboxed
        command = [interpreter.python, "-I", *(["-B"] if sys.dont_write_bytecode else []), runner.__file__]
        folders = (*interpreter.first, *interpreter.last)
        if interpreter.container is not None:
            assert channel is not None, "a container has a channel"
            self._process = start_contained(interpreter.container, command[1:], folders, channel=channel)
        elif self._sandboxed:
            self._process = start_sandboxed(command, folders, stderr=subprocess.DEVNULL, descriptors=descriptors)
        else:
            errors = _print_visibly()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                env=variables,
                pass_fds=descriptors,
                start_new_session=True,  # its descendants are killed with it, and Ctrl-C only reaches the parent
            )
            os.close(errors)
        assert self._process.stdin is not None and self._process.stdout is not None, "stdin and stdout are pipes"
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        self._order = {
            "parent": os.getpid() if interpreter.container is None else None,
            "first": interpreter.first,
            "last": interpreter.last,
            "limits": call_limits(seconds) if self._sandboxed else None,
            "user": NOBODY if self._sandboxed and switches_user() else None,
            "outside": str(Path("/proc/self/ns/pid").readlink()) if self._sandboxed else "",
            **order,
        }

    @property
    def pid(self) -> int:
        """Process id of the child process."""
        return self._process.pid

    @property
    def output(self) -> int:
        """File descriptor that becomes readable when the process has sent a message or has ended."""
        return self._out

    def start(self) -> None:
        """Send the order without waiting for the response, which `receive` returns later."""
        self.send(self._order)

    def ready(self) -> list[object]:
        """Wait until the process has imported the code, and return its description of the imported objects.

        Raises BadInput if the code cannot be used, WorkerFailed after `START_SECONDS`, and ProcessEnded if the process
        ends.
        """
        try:
            description, _ = self.exchange(self._order, START_SECONDS)
        except ProcessEnded as end:
            if end.cause == "time":
                raise WorkerFailed(f"{self._what}: its import took over {START_SECONDS:g} s. Make it faster") from None
            raise
        if isinstance(description, str):
            raise BadInput(description)
        if not isinstance(description, list):
            raise invalid_answer()
        return description

    def kill(self) -> None:
        """Kill the process, its process group and its descendants. Repeated calls have no effect."""
        if self._killed:
            return
        self._killed = True
        with suppress(psutil.Error):
            for each in psutil.Process(self.pid).children(recursive=True):
                with suppress(psutil.Error):
                    each.kill()
        with suppress(ProcessLookupError):  # another part of this program has collected the process
            os.killpg(self.pid, signal.SIGKILL)
        self._process.communicate()

    def send(self, content: object) -> None:
        """Send a message without waiting for a response. Raises ProcessEnded if the process does not read it."""
        unsent, deadline = memoryview(runner.frame(content)), time.monotonic() + START_SECONDS
        while unsent:
            polled = select.poll()
            polled.register(self._in, select.POLLOUT)
            if not polled.poll(1000 * EXIT_SECONDS) and time.monotonic() > deadline:
                raise ProcessEnded(f"its process read no message for {START_SECONDS:g} s", cause="time")
            try:
                unsent = unsent[os.write(self._in, unsent) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise self._end_error() from None

    def receive(self, seconds: float) -> tuple[object] | None:
        """Return the next message of the process in a tuple, or None if no message arrives within `seconds`. Raises
        ProcessEnded if the process ended or sent something else."""
        received = self._frame()
        return self._poll(memoryview(b""), seconds)[1] if received is None else received

    def exchange(self, content: object, seconds: float, *, stop_seconds: float = 0.0) -> tuple[object, float]:
        """Send a message. Return the response, and the elapsed seconds in which the process could run. Time spent
        waiting for a busy CPU is not counted. `seconds` is the time limit.

        After `seconds` the process is requested to stop its work, and has `stop_seconds` to return a partial response.
        Raises ProcessEnded if the process ended or is too slow, and WorkerLost if the machine is too busy.
        """
        if self._unread or _readable(self._out):
            raise self._end_error()
        unsent, clock = memoryview(runner.frame(content)), CallClock(self.pid, seconds)
        longest = seconds
        while True:
            unsent, answer = self._poll(unsent, clock.slice)
            counted = clock.counted_seconds()
            if answer is not None:
                if self._unread:
                    raise invalid_answer()
                return answer[0], counted
            if counted > seconds and stop_seconds and not unsent:
                unsent, stop_seconds, longest = memoryview(runner.frame(runner.STOP)), 0.0, seconds + stop_seconds
            elif counted > longest:
                raise self._timeout_error(seconds, used=clock.used)
            if clock.elapsed > MAX_SLOWDOWN * seconds + 60:
                raise WorkerLost(
                    f"{self._what}: a call with a limit of {seconds:g} s got {clock.used:.0f} s of CPU time in "
                    f"{clock.elapsed:.0f} s. The machine is overloaded. Lower pools.workers."
                )

    def _poll(self, unsent: memoryview, seconds: float) -> tuple[memoryview, tuple[object] | None]:
        """Send and receive data for at most `seconds`. Return the bytes that are not sent yet, and the received message
        in a tuple if it is complete, otherwise None."""
        polled = select.poll()
        polled.register(self._out, select.POLLIN)
        if unsent:
            polled.register(self._in, select.POLLOUT)
        ready = dict(polled.poll(seconds * 1000))
        if self._in in ready:
            try:
                unsent = unsent[os.write(self._in, unsent) :]
            except BrokenPipeError:  # the cause of the end is read from the other pipe
                unsent = unsent[:0]
        frame = None
        if self._out in ready:
            read = os.read(self._out, 1 << 16)
            self._unread += read
            frame = self._frame()
            if frame is None and not read:
                raise self._end_error()
        elif not ready and self._exit() is not None:  # a descendant of the process may keep the pipe open
            raise self._end_error()
        return unsent, frame

    def _frame(self) -> tuple[object] | None:
        """Remove a complete message from the received bytes and return it in a tuple. Return None if none is
        complete."""
        size = int.from_bytes(self._unread[: runner.LENGTH_BYTES], "big")
        whole = runner.LENGTH_BYTES + size
        if len(self._unread) < runner.LENGTH_BYTES or (size <= MAX_FRAME and len(self._unread) < whole):
            return None
        if size > MAX_FRAME:
            raise invalid_answer()
        body, self._unread = self._unread[runner.LENGTH_BYTES : whole], self._unread[whole:]
        try:
            return (json.loads(body),)
        except (ValueError, RecursionError):
            raise invalid_answer() from None

    def _timeout_error(self, seconds: float, *, used: float) -> ProcessEnded:
        """Return the error for a call that used `used` CPU seconds and exceeded its limit of `seconds`."""
        with suppress(psutil.Error):
            if not self._sandboxed and psutil.Process(self.pid).status() == psutil.STATUS_STOPPED:
                return ProcessEnded("its process was stopped", cause="SIGSTOP", num_repeats=None)
        return ProcessEnded(f"no value after {seconds:g} s", cause="time", num_repeats=1 if used > seconds / 2 else 2)

    def _end_error(self) -> ProcessEnded:
        """Return the error that describes how the process ended."""
        if self._unread or _readable(self._out):
            return invalid_answer()
        clock = CallClock(self.pid, EXIT_SECONDS)
        while (code := self._exit()) is None:
            if clock.counted_seconds() > EXIT_SECONDS:
                return ProcessEnded("its process closed the pipe", cause="own")
            time.sleep(EXIT_SECONDS / 100)
        if self._sandboxed and code > 128:  # like shells, the runner reports a signal inside as 128 + signal
            return _signal_error(sandbox_runner.signal_name(code - 128), inside=True)
        if code >= 0:
            return ProcessEnded(f"its process ended with exit code {code}", cause="own")
        return _signal_error(sandbox_runner.signal_name(-code))

    def _exit(self) -> int | None:
        """Return the process's exit code, or the negative number of the signal that ended it, or None while it runs.

        On Linux, no other process gets the same id before this class kills the process.
        """
        if sys.platform != "linux":
            return self._process.poll()
        try:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # another part of this program has collected the process
            return 0
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _print_visibly() -> int:
    """Return a pipe for users' functions to print to. A thread copies it to stderr with control characters escaped."""
    read, write = os.pipe()

    def copy() -> None:
        with os.fdopen(read, "rb") as printed:
            for line in iter(partial(printed.readline, 1 << 16), b""):
                sys.stderr.write(make_visible(line.decode(errors="replace")))
                sys.stderr.flush()

    threading.Thread(target=copy, name="printed by functions", daemon=True).start()
    return write


def _readable(pipe: int) -> bool:
    """Return whether the pipe has data to read. The result is False if the other end was closed."""
    polled = select.poll()
    polled.register(pipe, select.POLLIN)
    return any(event & select.POLLIN for _, event in polled.poll(0))


def _signal_error(name: str, *, inside: bool = False) -> ProcessEnded:
    """Return the error for a process (in a sandbox if `inside` is true) that a signal with this name has ended.

    The call counts as the cause only if the kernel sends this signal because of an error in the process itself. Code
    `inside` a sandbox can also send signals to its own process, so there any signal may have been caused by the call.
    """
    num_repeats = 2 if name in _CRASHES else MAX_ENDS if inside else None
    return ProcessEnded(f"{sandbox_runner.KILLED}{name}", cause=name, num_repeats=num_repeats)


def invalid_answer() -> ProcessEnded:
    """Return the error for data in a child process's pipe that is not a valid response."""
    return ProcessEnded("its process wrote something other than a valid response", cause="own")


def check_answer(answer: object, token: str) -> tuple[object, str | None]:
    """Validate a response from a child process's pipe, to which users' code may have written anything. `token`
    identifies the call. Return (value, None) if the call succeeded, or (None, reason) if it failed.

    Raises ProcessEnded if the process of the call ended, or if the response is not valid.
    """
    if not isinstance(answer, list) or len(answer) != 4 or answer[0] != token:
        raise invalid_answer()
    _, value, reason, end = answer
    if isinstance(end, str):
        if end.startswith(sandbox_runner.KILLED):
            raise _signal_error(runner.one_line(end.removeprefix(sandbox_runner.KILLED)), inside=True)
        raise ProcessEnded(runner.one_line(end), cause="own")
    if isinstance(reason, str) and value is None:
        return None, runner.one_line(reason)
    if reason is not None:
        raise invalid_answer()
    return value, None
