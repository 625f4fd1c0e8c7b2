"""Notice that a server which a run stands on has failed, and see to it that a run which must end does end.

Both happen in threads of their own: whoever waits for a dead server may wait inside a library that never returns.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import psutil

from infra.errors import WorkerFailed

T = TypeVar("T")

LOOK_SECONDS = 0.25
STOPPED_SECONDS = 2.0
"""How long a process must have been stopped before it counts as such: a terminal's ^Z stops this one, too."""
ASK_SECONDS = 2.0
SILENT_SECONDS = 20.0
"""How long a server may owe an answer while it does not compute either."""
STILL_SECONDS = 600.0
"""The same for a command that may read from slow disks, or ask others over the network."""
END_SECONDS = 8.0
"""How long a process that was told to end may take to end in order."""
EXIT_SECONDS = 2.0
"""How long of that it may take after its main thread has ended."""


@dataclass(slots=True)
class WatchedServer:
    """A server process that a run stands on."""

    what: str
    """Its name in messages."""
    process: psutil.Process
    answers: Callable[[], bool]
    """Whether it answers a cheap question; takes a second or two at most."""
    silent_seconds: float = SILENT_SECONDS
    problem: str | None = None
    """What is wrong with it, once something was."""
    cpu_seconds: float = 0.0
    """That it has computed so far."""
    _stopped_seconds: float = 0.0
    _switches: int = 0
    """How often it had left a processor when it was last seen stopped."""
    _looked: float = field(default_factory=time.monotonic)
    _asked: float = field(default_factory=time.monotonic)
    _heard: float = field(default_factory=time.monotonic)

    def failure(self) -> str | None:
        """Look at it, and say what is wrong; none while it answers, or at least computes."""
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
        passed, self._looked = min(now - self._looked, STOPPED_SECONDS / 2), now  # this process may have been stopped
        self._stopped_seconds = self._stopped_seconds + passed if self._is_still_stopped(status) else 0.0
        if self._stopped_seconds >= STOPPED_SECONDS:
            return f"{self.what} (pid {self.process.pid}) is stopped"
        if cpu_seconds != self.cpu_seconds:
            self.cpu_seconds, self._heard = cpu_seconds, now
        if now - max(self._asked, self._heard) >= ASK_SECONDS and not self._stopped_seconds:  # what computes, lives
            self._heard, self._asked = now if self.answers() else self._heard, time.monotonic()
        if now - self._heard > self.silent_seconds:
            silent = f"neither answers nor computes for {self.silent_seconds:g} s"
            return f"{self.what} (pid {self.process.pid}) {silent}"
        return None

    def _is_still_stopped(self, status: str) -> bool:
        """Say whether it is stopped, and has not run since it was last seen so."""
        if status != psutil.STATUS_STOPPED:
            return False
        with contextlib.suppress(psutil.Error):
            before, self._switches = self._switches, sum(self.process.num_ctx_switches())
            return self._switches == before
        return True


@dataclass(slots=True)
class WatchedPort:
    """A server that another process has started, which lives as long as its port takes connections."""

    what: str
    """Its name in messages."""
    address: tuple[str, int]
    _asked: float = field(default_factory=time.monotonic)
    _heard: float = field(default_factory=time.monotonic)

    def failure(self) -> str | None:
        """Ask it, unless it was asked just now, and say what is wrong; none while it takes connections."""
        if time.monotonic() - self._asked >= ASK_SECONDS:
            with contextlib.suppress(OSError), socket.create_connection(self.address, timeout=ASK_SECONDS):
                self._heard = time.monotonic()
            self._asked = time.monotonic()
        return f"{self.what} is gone" if self._asked - self._heard > 2 * ASK_SECONDS else None


class Watch:
    """Look at servers from a thread, and tell once when one has failed."""

    def __init__(
        self, servers: Callable[[], Sequence[WatchedServer | WatchedPort]], failed: Callable[[str], None]
    ) -> None:
        """Begin to look at those that there are at each look."""
        self.problem: str | None = None
        """What has failed, once something has."""
        self._servers, self._failed = servers, failed
        self._leave = threading.Event()
        threading.Thread(target=self._look, name="watch", daemon=True).start()

    def look(self) -> str | None:
        """Look now, in order to explain what went wrong; what was found before stays."""
        if self.problem is None:
            problem = next(filter(None, (server.failure() for server in self._servers())), None)
            if not self._leave.is_set():  # what ends after that is ended on purpose
                self.problem = problem
        return self.problem

    def stop(self) -> None:
        """Look no more."""
        self._leave.set()

    def _look(self) -> None:
        while not self._leave.wait(LOOK_SECONDS):
            if self.look() is not None:
                self._failed(str(self.problem))
                return


class Ending:
    """End this process by force when it was told to end and does not: a run's work is in the store."""

    def __init__(self) -> None:
        """Wait for an order to end."""
        self._lock = threading.Lock()
        self._told: int | None = None

    def begin(self, code: int, line: str) -> None:
        """Leave the process `END_SECONDS`, then print the line and exit with the code; only the first order counts."""
        with self._lock:
            if self._told is not None:
                return
            self._told = code
        threading.Thread(target=self._wait, args=(code, line), name="ending", daemon=True).start()

    def over(self) -> None:
        """What was to end has; after an order, the process shall end as soon as its main thread has."""
        if self._told is not None:
            exit_soon(self._told)

    def _wait(self, code: int, line: str) -> None:
        time.sleep(END_SECONDS)
        if threading.main_thread().is_alive():  # else the command has said so
            os.write(2, f"{line}\n".encode())
        os._exit(code)  # guards end what this process has started


def exit_soon(code: int) -> None:
    """Have this process end at its exit with the code, whatever a library that has lost its servers waits for then."""

    def wait() -> None:
        threading.main_thread().join()
        time.sleep(EXIT_SECONDS)
        os._exit(code)

    threading.Thread(target=wait, name="exit", daemon=True).start()


@contextlib.contextmanager
def on_signals(told: Callable[[int], None]) -> Iterator[None]:
    """Call a function, in a thread of its own, when SIGINT or SIGTERM comes, wherever the main thread waits then."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reads, writes = socket.socketpair()
    writes.setblocking(False)

    def listen() -> None:
        while number := reads.recv(1):
            if number[0] in (signal.SIGINT, signal.SIGTERM):
                told(number[0])
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
    """See to it that SIGINT and SIGTERM end this process within seconds, whatever it waits for then.

    Both raise KeyboardInterrupt, SIGTERM with its number. That goes for SIGINT where it is ignored, too, as by a
    script's `&`: who sends it to a run wants the run to end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    ending, came = Ending(), list[int]()

    def interrupt(number: int, _: object) -> None:
        came.append(number)
        if len(came) == 1:  # again, it would only disturb the end
            raise KeyboardInterrupt(number)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with on_signals(lambda number: ending.begin(128 + number, line)):
            yield
    finally:
        signal.signal(signal.SIGTERM, before)
        ending.over()


async def apart(body: Callable[[], T]) -> T:
    """Call what may wait for a server for ever in a thread that nobody waits for, not even at the end."""
    return await asyncio.wrap_future(aside(body))


def aside(body: Callable[[], T]) -> "Future[T]":
    """Begin to call something in such a thread."""
    answer: Future[T] = Future()

    def call() -> None:
        if answer.set_running_or_notify_cancel():
            try:
                answer.set_result(body())
            except BaseException as error:
                answer.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return answer


def await_answer(what: str, command: Sequence[str], given: bytes) -> tuple[int, bytes, bytes]:
    """Run a command on what it is given; return its exit code, and what it wrote to stdout and stderr.

    Raises WorkerFailed for one that is stopped, or that computes nothing for `STILL_SECONDS`.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        server = WatchedServer(what, psutil.Process(process.pid), lambda: False, silent_seconds=STILL_SECONDS)
        feed: bytes | None = given
        while True:
            try:
                answer, errors = process.communicate(feed, timeout=LOOK_SECONDS)
                return process.returncode, answer, errors
            except subprocess.TimeoutExpired:
                feed = None
                if (problem := server.failure()) is not None:
                    return _last_answer(process, problem)
            except BaseException:
                process.kill()
                raise


def _last_answer(process: "subprocess.Popen[bytes]", problem: str) -> tuple[int, bytes, bytes]:
    """Wait for a failed command's answer all the same: one that ends is dead before its last thread is."""
    try:
        answer, errors = process.communicate(timeout=EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise WorkerFailed(problem) from None
    return process.returncode, answer, errors
