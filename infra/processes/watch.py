"""Detection of failed servers, and forced exit of a process that does not end after a signal.

Both run in separate threads. The main thread may be blocked forever in a library call that waits for a dead server.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import psutil

from rheostat.infra.errors import WorkerFailed
from rheostat.infra.untrusted_text import make_visible

T = TypeVar("T")

CHECK_SECONDS = 0.25
STOPPED_SECONDS = 2.0
"""Seconds for which a server may be suspended before it is considered failed. Short suspensions are normal, because
Ctrl-Z in a terminal suspends the server together with this process."""
QUERY_SECONDS = 2.0
SILENT_SECONDS = 20.0
"""Seconds for which a server may neither respond nor use CPU time before it is considered failed."""
IDLE_SECONDS = 600.0
"""Seconds for which a command may use no CPU time before it is considered failed. The time is long, because commands
may wait for slow disks or the network."""
END_SECONDS = 8.0
"""Maximum time in seconds for this process to end normally after a signal. Then it is forced to exit."""
EXIT_SECONDS = 2.0
"""Maximum time in seconds for this process to end after its main thread has ended, while other threads may still be
running."""


@dataclass(slots=True)
class WatchedServer:
    """Server process that is checked regularly. The method `failure` detects whether the process has died, is suspended
    or no longer responds."""

    what: str
    """Name of the server in error messages."""
    process: psutil.Process
    answers: Callable[[], bool]
    """Function that returns whether the server responds to a small request. It must return within two seconds."""
    silent_seconds: float = SILENT_SECONDS
    problem: str | None = None
    """Reason why the server failed, or None if it has not failed."""
    cpu_seconds: float = 0.0
    """CPU seconds that the server has used so far."""
    _stopped_seconds: float = 0.0
    _switches: int = 0
    """Number of context switches of the process when it was last seen suspended. If the number has grown, the process
    has run since."""
    _looked: float = field(default_factory=time.monotonic)
    _asked: float = field(default_factory=time.monotonic)
    _heard: float = field(default_factory=time.monotonic)

    def failure(self) -> str | None:
        """Check the server. Return the reason if it has failed, otherwise None. A server that uses CPU time is
        considered alive even if it does not respond."""
        if self.problem is None:
            self.problem = self._failure()
        return self.problem

    def _failure(self) -> str | None:
        try:
            status = self.process.status()
            times = self.process.cpu_times()
        except psutil.Error:
            return f"{self.what} (pid {self.process.pid}) has died"
        if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return f"{self.what} (pid {self.process.pid}) has died"
        now, cpu_seconds = time.monotonic(), times.user + times.system
        passed, self._looked = min(now - self._looked, STOPPED_SECONDS / 2), now  # this process may have been suspended
        self._stopped_seconds = self._stopped_seconds + passed if self._is_still_stopped(status) else 0.0
        if self._stopped_seconds >= STOPPED_SECONDS:
            return f"{self.what} (pid {self.process.pid}) is suspended"
        if cpu_seconds != self.cpu_seconds:
            self.cpu_seconds, self._heard = cpu_seconds, now
        if now - max(self._asked, self._heard) >= QUERY_SECONDS and not self._stopped_seconds:  # CPU use shows life
            self._heard, self._asked = now if self.answers() else self._heard, time.monotonic()
        if now - self._heard > self.silent_seconds:
            silent = f"has neither responded nor used CPU time for {self.silent_seconds:g} s"
            return f"{self.what} (pid {self.process.pid}) {silent}"
        return None

    def _is_still_stopped(self, status: str) -> bool:
        """Return whether the process is suspended and has not run since the last check."""
        if status != psutil.STATUS_STOPPED:
            return False
        with contextlib.suppress(psutil.Error):
            before, self._switches = self._switches, sum(self.process.num_ctx_switches())
            return self._switches == before
        return True


@dataclass(slots=True)
class WatchedPort:
    """Server of another process that is checked regularly. It is considered alive as long as its port accepts
    connections."""

    what: str
    """Name of the server in error messages."""
    address: tuple[str, int]
    _asked: float = field(default_factory=time.monotonic)
    _heard: float = field(default_factory=time.monotonic)

    def failure(self) -> str | None:
        """Check whether the port accepts connections, at most once every `QUERY_SECONDS`. Return the reason if the
        server has failed, otherwise None."""
        if time.monotonic() - self._asked >= QUERY_SECONDS:
            with contextlib.suppress(OSError), socket.create_connection(self.address, timeout=QUERY_SECONDS):
                self._heard = time.monotonic()
            self._asked = time.monotonic()
        return f"{self.what} accepts no more connections" if self._asked - self._heard > 2 * QUERY_SECONDS else None


class Watch:
    """Thread that checks servers regularly. When a server fails, the thread calls the function `failed` with the
    reason, and ends."""

    def __init__(
        self, servers: Callable[[], Sequence[WatchedServer | WatchedPort]], failed: Callable[[str], None]
    ) -> None:
        """Start the thread. It calls `servers` before each check to get the servers that exist at this time."""
        self.problem: str | None = None
        """Reason why a server failed, or None if no server has failed."""
        self._servers, self._failed = servers, failed
        self._leave = threading.Event()
        threading.Thread(target=self._look, name="watch", daemon=True).start()

    def check(self) -> str | None:
        """Check the servers now. Return the reason if one of them has failed, otherwise None. After the first failure,
        every call returns the same reason."""
        if self.problem is None:
            problem = next(filter(None, (server.failure() for server in self._servers())), None)
            if not self._leave.is_set():  # later ends are on purpose
                self.problem = problem
        return self.problem

    def stop(self) -> None:
        """Stop watching the servers."""
        self._leave.set()

    def _look(self) -> None:
        while not self._leave.wait(CHECK_SECONDS):
            if self.check() is not None:
                self._failed(str(self.problem))
                return


class ForcedExit:
    """Forced exit of this process if it does not end in time after a signal or failure. No stored results are lost."""

    def __init__(self) -> None:
        """Create a forced exit, which has no effect until `begin` is called."""
        self._lock = threading.Lock()
        self._code: int | None = None

    def begin(self, code: int, line: str) -> None:
        """Start a timer: if this process is still running after `END_SECONDS`, print `line` and exit with the code.
        Only the first call has an effect."""
        with self._lock:
            if self._code is not None:
                return
            self._code = code
        threading.Thread(target=self._wait, args=(code, line), name="ending", daemon=True).start()

    def finish(self) -> None:
        """Signal that the work has ended. If `begin` was called, this process exits shortly after its main thread has
        ended."""
        if self._code is not None:
            exit_soon(self._code)

    def _wait(self, code: int, line: str) -> None:
        time.sleep(END_SECONDS)
        if threading.main_thread().is_alive():  # otherwise the command has printed its own message
            os.write(2, f"{make_visible(line)}\n".encode())
        os._exit(code)  # guards end the processes that this process started


def exit_soon(code: int) -> None:
    """Exit with the code shortly after the main thread has ended, even if a library's thread still waits for a server
    that has failed."""

    def wait() -> None:
        threading.main_thread().join()
        time.sleep(EXIT_SECONDS)
        os._exit(code)

    threading.Thread(target=wait, name="exit", daemon=True).start()


@contextlib.contextmanager
def on_signals(notify: Callable[[int], None]) -> Iterator[None]:
    """Run the block. For each SIGINT or SIGTERM that arrives, call `notify` with the signal's number, in a separate
    thread.

    `notify` is called even while the main thread is blocked in a library call. If the block does not run in the main
    thread, signals are not handled.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reads, writes = socket.socketpair()
    writes.setblocking(False)

    def listen() -> None:
        while number := reads.recv(1):
            if number[0] in (signal.SIGINT, signal.SIGTERM):
                notify(number[0])
        reads.close()

    threading.Thread(target=listen, name="signals", daemon=True).start()
    before = signal.set_wakeup_fd(writes.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writes.close()


@contextlib.contextmanager
def ended_by_signals(line: str) -> Iterator[None]:
    """Run the block, and make sure that this process ends within seconds after SIGINT or SIGTERM, even if it is blocked
    in a library call. `line` is printed if the exit must be forced.

    Both signals raise KeyboardInterrupt. For SIGTERM, the signal number is passed as its argument. SIGINT is also
    handled if it was ignored before, as in commands that a script starts with `&`.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    ending, signals = ForcedExit(), list[int]()

    def interrupt(number: int, _: object) -> None:
        signals.append(number)
        if len(signals) == 1:  # further signals would only disturb the end
            raise KeyboardInterrupt(number)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with on_signals(lambda number: ending.begin(128 + number, line)):
            yield
    finally:
        signal.signal(signal.SIGTERM, before)
        ending.finish()


async def run_apart(body: Callable[[], T]) -> T:
    """Call a function in a separate daemon thread, and await its result.

    Use this if the function may wait for a server forever. The process can exit while the thread is still running.
    """
    return await asyncio.wrap_future(start_apart(body))


async def kill_and_wait(process: Process) -> None:
    """Kill a child process of asyncio if it still runs, and wait up to `END_SECONDS` until it has ended. If the event
    loop were closed before, Python would write an error message when it deletes the process object."""
    if process.returncode is None:
        process.kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), END_SECONDS)


def start_apart(body: Callable[[], T]) -> "Future[T]":
    """Call a function in a separate daemon thread, and return a future for its result."""
    answer: Future[T] = Future()

    def call() -> None:
        if answer.set_running_or_notify_cancel():
            try:
                answer.set_result(body())
            except BaseException as error:
                answer.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return answer


def run_watched(what: str, command: Sequence[str], content: bytes) -> tuple[int, bytes, bytes]:
    """Run a command with `content` as its stdin, and wait for its end. Return its exit code, its stdout and its stderr.
    `what` names the command in messages.

    Raises WorkerFailed if the command is suspended or uses no CPU time for `IDLE_SECONDS`.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        server = WatchedServer(what, psutil.Process(process.pid), lambda: False, silent_seconds=IDLE_SECONDS)
        feed: bytes | None = content
        while True:
            try:
                answer, errors = process.communicate(feed, timeout=CHECK_SECONDS)
                return process.returncode, answer, errors
            except subprocess.TimeoutExpired:
                feed = None
                if (problem := server.failure()) is not None:
                    return _read_last_output(process, problem)
            except BaseException:
                process.kill()
                raise


def _read_last_output(process: "subprocess.Popen[bytes]", problem: str) -> tuple[int, bytes, bytes]:
    """Return the exit code, stdout and stderr of a command that was found dead. A process can be reported as dead
    shortly before its last output arrives. Raises WorkerFailed with `problem` if it does not end."""
    try:
        answer, errors = process.communicate(timeout=EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise WorkerFailed(problem) from None
    return process.returncode, answer, errors
