"""Child processes that copy the metrics of a run to its trackers. A tracker that hangs or fails cannot affect the run.

The library of a tracker starts threads, hooks and servers, takes seconds to import, and may wait for its service
forever. None of this happens in the process that trains.
"""

import json
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Final

from pydantic import JsonValue, TypeAdapter, ValidationError

from rheostat.infra.config import Settings
from rheostat.infra.trackers.config import TrackerConfig

STUCK: Final = 5
"""Factor by which a tracker may be silent for longer than `patience_seconds`, while the run is still training or the
tracker's process uses the CPU."""
_MORE_SECONDS = 5.0  # additional time for a process that gives up by itself


class MirrorOrder(Settings):
    """First message to a tracker process: the run whose metrics it copies, and the tracker to which it copies them."""

    store: str
    """Address of the store that contains the run."""
    run: str
    """Name of the run."""
    tracker: TrackerConfig
    """Tracker to which the metrics of the run are copied."""
    patience_seconds: float
    """Maximum time in seconds for which a call of the tracker may neither return nor use CPU time, after the run has
    ended."""


class MirrorReport(Settings):
    """Message from a tracker process about its progress, sent as one line of JSON."""

    tracker: str
    """Name of the tracker in messages."""
    points: int = 0
    """Number of iterations and evaluations that the process has copied to the tracker so far."""
    step: int | None = None
    """Last step that was copied to the tracker, or None if nothing was copied."""
    problem: str = ""
    """Description of the problem that prevents the process from continuing, or an empty string."""
    is_over: bool = False
    """Whether all data was copied and the process ends."""


@dataclass(slots=True)
class MirrorProcess:
    """Child process that copies the metrics of a run to one tracker. If it has ended, the next request starts it
    again."""

    command: Sequence[str]
    """Command line of the process. It reads a `MirrorOrder` from its stdin, and then one empty line for each request to
    copy new data."""
    order: MirrorOrder
    reports: SimpleQueue[MirrorReport] = field(default_factory=SimpleQueue)
    last: MirrorReport | None = None
    process: "subprocess.Popen[bytes] | None" = None
    _listener: threading.Thread | None = None
    _problem: str = ""
    """Problem in the last report of the process, or an empty string."""
    _news: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the tracker in messages."""
        return self.order.tracker.label

    def request_sync(self) -> None:
        """Ask the process to copy new data to the tracker, without waiting until this is done. Start the process if it
        is not running."""
        if self.process is None or self.process.poll() is not None:
            self._start()
        with suppress(OSError):  # the process has ended, which its last report or the next call shows
            os.write(self._stdin, b"\n")

    def end(self) -> None:
        """Ask the process to copy the remaining data and then to end."""
        if self.process is not None and self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()

    def wait(self) -> None:
        """Wait until the process has ended. If it sends no report for too long, kill it."""
        process = self.process
        if process is None:
            return
        while process.poll() is None:
            before = self.last
            with suppress(subprocess.TimeoutExpired):
                process.wait(STUCK * self.order.patience_seconds + _MORE_SECONDS)
            self._read_reports()
            if self.last is before:
                break
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also kills its descendants
        process.wait()
        if self._listener is not None:
            self._listener.join(_MORE_SECONDS)
        self._read_reports()

    def new_problems(self) -> list[str]:
        """Return the problems that the process has reported since the last call. A problem that is reported several
        times in a row is returned once."""
        self._read_reports()
        problems, self._news = self._news, []
        return problems

    def _read_reports(self) -> None:
        with suppress(Empty):
            while True:
                report = self.last = self.reports.get_nowait()
                if report.problem and report.problem != self._problem:
                    self._news.append(report.problem)
                self._problem = report.problem

    @property
    def _stdin(self) -> int:
        assert self.process is not None and self.process.stdin is not None, "stdin is a pipe"
        return self.process.stdin.fileno()

    def _start(self) -> None:
        self.end()
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # Ctrl-C only reaches the run, which then ends this process in order
        )
        os.write(self._stdin, self.order.model_dump_json().encode() + b"\n")  # fits into a pipe that is not read yet
        os.set_blocking(self._stdin, False)
        self._listener = threading.Thread(target=self._listen, args=(self.process,), name=self.name, daemon=True)
        self._listener.start()

    def _listen(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None, "stdout is a pipe"
        report = TypeAdapter(MirrorReport)
        for line in process.stdout:
            with suppress(ValidationError):
                self.reports.put(report.validate_json(line))
        if (code := process.wait()) != 0:
            self.reports.put(
                MirrorReport(
                    tracker=self.name,
                    problem=f"the process that sends metrics to this tracker ended with exit code {code}",
                )
            )


class TrackerProcesses:
    """Processes that copy the metrics of one run to its trackers, one per tracker, as seen by the process that trains
    or reads the run."""

    def __init__(self, command: Sequence[str], orders: Sequence[MirrorOrder]) -> None:
        """Prepare the processes. They start when `request_sync` is first called."""
        self.mirrors = [MirrorProcess(command, order) for order in orders]

    def request_sync(self) -> None:
        """Ask all tracker processes to copy new data, without waiting until this is done."""
        for mirror in self.mirrors:
            mirror.request_sync()

    def warnings(self) -> list[str]:
        """Return one warning for each new problem of a tracker."""
        return [
            f"tracker {mirror.name!r} is not up to date: {line}"
            for mirror in self.mirrors
            for line in mirror.new_problems()
        ]

    def finish(self) -> list[MirrorReport]:
        """Ask all tracker processes to copy the remaining data, wait until they have ended, and return the last report
        of each."""
        for mirror in self.mirrors:
            mirror.request_sync()
            mirror.end()
        for mirror in self.mirrors:
            mirror.wait()
        return [_last(mirror) for mirror in self.mirrors]


def _last(mirror: MirrorProcess) -> MirrorReport:
    silent = MirrorReport(tracker=mirror.name, problem="the process that sends metrics to this tracker did not respond")
    last = mirror.last or silent
    return last if last.is_over or last.problem else last.model_copy(update={"problem": silent.problem})


def send(report: MirrorReport, to: int) -> None:
    """Write a report of a tracker process to the file descriptor `to`. Do nothing if the process that reads it was
    killed."""
    line: JsonValue = report.model_dump(mode="json", exclude_defaults=True)
    with suppress(BrokenPipeError):
        os.write(to, json.dumps(line).encode() + b"\n")
