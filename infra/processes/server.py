"""Servers that run in another Python environment and end with the process that started them (their owner).

The owner starts and watches a server. The guard (infra/processes/guard.py) ends the server when the owner ends.
"""

import contextlib
import errno
import logging
import os
import select
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from rheostat.infra.errors import WorkerFailed, WorkerLost
from rheostat.infra.processes import guard

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
POLL_SECONDS = 0.2
BUSY_SHARE = 0.1
"""Fraction of one CPU core above which a server counts as active. A server that only waits for requests uses less."""
TAIL_BYTES = 64 * 2**10
ERROR_LINES = 12
"""Number of lines from the end of the log that are included in an error message."""
PORT_ATTEMPTS = 3
ADDRESS_IN_USE = os.strerror(errno.EADDRINUSE).lower()
CODE_SECONDS = 30.0
"""Maximum time in seconds to wait for the guard process to report the exit code of a command. If the guard has ended,
no code is awaited."""


class OwnedProcess:
    """Command that this process runs and owns. The command and all its descendants end when this process ends, even if
    this process is killed.

    The command runs in a temporary directory, which also contains its log. The directory is deleted when the command
    ends.
    """

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str]) -> None:
        """Start the command with these environment variables. TMPDIR and the variable with which the guard finds the
        processes are added."""
        cluster = os.environ.get(guard.CLUSTER)
        home = cluster if cluster is not None and Path(cluster).is_dir() else "/tmp"
        self.directory = Path(tempfile.mkdtemp(prefix="rheostat-", dir=home))  # short: it contains sockets
        self.log_path = self.directory / guard.LOG
        self.log_path.touch()
        self._log = self.log_path.open("rb")
        self._size, self._cpu_seconds, self._seen = 0, 0.0, time.monotonic()
        variables = {**environment, "TMPDIR": str(self.directory)}
        self._guard = guard.start_guard(self.directory, command, environment=variables)
        self._lines = self._guard.stdout
        assert self._lines is not None, "the stdout of a guard is a pipe"
        line = self._lines.readline().decode().strip()
        self._guard.wait(guard.GIVE_UP_SECONDS)  # the guard has handed over to its child
        if not line.isdigit():
            self.stop()
            raise WorkerFailed(f"the command {command[0]} did not start: {line or 'the guard process ended'}")
        self.pid = int(line)
        self._process = _process(self.pid)

    def alive(self) -> bool:
        """Return whether the command itself is running. Other processes that the command has started are not
        considered, because they are killed when the command ends."""
        with contextlib.suppress(psutil.Error):
            process = self._process
            return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return False

    def await_exit_code(self) -> int | None:
        """Wait until the guard has reported the exit code of a command that has ended, and return the code. Return None
        if the guard was killed, or does not report within `CODE_SECONDS`."""
        deadline, stdout = time.monotonic() + CODE_SECONDS, self._guard.stdout
        assert stdout is not None, "the stdout of a guard is a pipe"
        while self.exit_code() is None and time.monotonic() < deadline:
            if select.select([stdout], [], [], POLL_SECONDS / 4)[0]:  # closed, because the guard has ended
                break
        return self.exit_code()

    def exit_code(self) -> int | None:
        """Return the exit code of the command (negative for a signal) if it has ended by itself, otherwise None."""
        with contextlib.suppress(OSError):
            content = (self.directory / guard.ENDED).read_text()
            return int(content) if content.endswith("\n") else None
        return None

    def tail(self, lines: int) -> tuple[str, ...]:
        """Return up to `lines` non-empty lines from the end of the command's log. Also works after the command has
        ended."""
        size = os.fstat(self._log.fileno()).st_size
        begin = max(0, size - TAIL_BYTES)
        text = os.pread(self._log.fileno(), size - begin, begin).decode(errors="replace")
        return tuple(line.rstrip() for line in text.splitlines() if line.strip())[-lines:]

    def was_active(self) -> bool:
        """Return whether the command has written to its log or used CPU time since the previous call of this method."""
        now, size, cpu_seconds = time.monotonic(), os.fstat(self._log.fileno()).st_size, self._cpu()
        busy = cpu_seconds - self._cpu_seconds > BUSY_SHARE * (now - self._seen)
        is_active = size != self._size or busy
        self._size, self._cpu_seconds, self._seen = size, cpu_seconds, now
        return is_active

    def stop(self) -> None:
        """End all processes of the command and delete its directory. Returns when both are done."""
        stdin, stdout = self._guard.stdin, self._guard.stdout
        assert stdin is not None and stdout is not None, "stdin and stdout of a guard are pipes"
        if not stdin.closed:
            with contextlib.suppress(OSError):
                stdin.write(b"stop\n")
                stdin.flush()
            with contextlib.suppress(OSError):
                stdin.close()
            stdout.read()  # until the guard ends
            stdout.close()
            guard.reap(self.directory, spared=os.getpid())  # in case the guard was killed
            shutil.rmtree(self.directory, ignore_errors=True)

    def _cpu(self) -> float:
        """Return the total CPU seconds that the processes of the command have used."""
        total = 0.0
        with contextlib.suppress(psutil.Error):
            processes = [self._process, *self._process.children(recursive=True)] if self._process else []
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    total += times.user + times.system
        return total


def _process(pid: int) -> psutil.Process | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid)
    return None


def last_lines(process: OwnedProcess) -> str:
    """Return the last lines of a command's log, joined into one line for an error message."""
    return " | ".join(process.tail(ERROR_LINES))


@dataclass(frozen=True, slots=True)
class Launch:
    """Description of a server to start: its command and environment, and the function that checks whether it is
    ready."""

    what: str
    """Name of the server in error messages."""
    command: Callable[[int], Sequence[str]]
    """Function that returns the command line for a server at the given port of the loopback interface."""
    environment: Mapping[str, str]
    ready: Callable[[int], bool]
    """Function that returns whether a server at the given port responds. It must return within two seconds."""
    start_seconds: float
    explain: Callable[[OwnedProcess], str] = last_lines
    """Function that explains why a server ended, using its log."""


def free_ports() -> Iterator[int]:
    """Yield unused ports on the loopback interface, at most `PORT_ATTEMPTS` of them."""
    for _ in range(PORT_ATTEMPTS):
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            port = int(probe.getsockname()[1])
        yield port


def start(launch: Launch, *, on_progress: Callable[[], None], ports: Iterable[int]) -> tuple[OwnedProcess, int]:
    """Start a server, wait until it is ready, and return its process and its port. `ports` are the candidates: if
    another process has taken a port in the meantime, the next one is tried. `on_progress` is called whenever the server
    shows activity.

    Raises WorkerLost if a signal ended the server, because the work is then not the cause. Raises WorkerFailed if the
    server ended in another way or is not ready within `start_seconds`.
    """
    failure = WorkerFailed(f"{launch.what} could not start, because there was no free port to try")
    for port in ports:
        process = OwnedProcess(launch.command(port), environment=launch.environment)
        try:
            _await_ready(process, launch, port, on_progress)
        except WorkerFailed as error:
            taken = not process.alive() and ADDRESS_IN_USE in "\n".join(process.tail(TAIL_BYTES)).lower()
            process.stop()
            if not taken:
                raise
            logger.info("%s: port %d is now used by another process", launch.what, port)
            failure = error
        except BaseException:
            process.stop()
            raise
        else:
            return process, port
    raise failure


def _await_ready(process: OwnedProcess, launch: Launch, port: int, on_progress: Callable[[], None]) -> None:
    deadline = time.monotonic() + launch.start_seconds
    while not (launch.ready(port) and process.alive()):  # in this order, because another server may respond at the port
        if not process.alive():
            how = _describe_end(process)
            ended = WorkerLost if (process.exit_code() or 0) < 0 else WorkerFailed
            raise ended(f"{launch.what} ended{how} before it was ready: {launch.explain(process)}")
        if time.monotonic() > deadline:
            late = f"was not ready within {launch.start_seconds:g} s"
            raise WorkerFailed(f"{launch.what} {late}. The log ends with: {last_lines(process)}")
        if process.was_active():
            on_progress()
        time.sleep(POLL_SECONDS)


def _describe_end(process: OwnedProcess) -> str:
    code = process.await_exit_code()
    if code is None:
        return ""
    return f" with exit code {code}" if code >= 0 else f" by {signal.Signals(-code).name}"
