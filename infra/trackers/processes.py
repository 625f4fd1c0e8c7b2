"""Child processes that mirror a run, one for each tracker, so that a hanging or failing tracker cannot affect the run.

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

from infra.config import Settings
from infra.trackers.config import TrackerConfig

STUCK: Final = 5
"""Limit for a silent process that is busy or whose run still trains, as a multiple of `patience_seconds`."""
_MORE_SECONDS = 5.0  # additional time for a process that gives up by itself


class MirrorOrder(Settings):
    """Order that tells a process which run to mirror, and to which tracker."""

    store: str
    """Address of the store with the run."""
    run: str
    """Name of the run."""
    tracker: TrackerConfig
    """Tracker to which the run is mirrored."""
    patience_seconds: float
    """Maximum time in seconds without a report and without CPU use, while the process waits for nothing else."""


class MirrorReport(Settings):
    """Report of a tracker process, written as one line of JSON."""

    tracker: str
    """Name of the tracker in messages."""
    points: int = 0
    """Number of iterations and evaluations that this process has mirrored."""
    step: int | None = None
    """Last mirrored step, or None."""
    problem: str = ""
    """Problem that keeps the process from continuing, or an empty string."""
    is_over: bool = False
    """Whether everything is mirrored and the process ends."""


@dataclass(slots=True)
class MirrorProcess:
    """Process of one tracker. It is started again if it is needed and has ended."""

    command: Sequence[str]
    """Command line. Its stdin gets the order, and then one line per request to look for new data."""
    order: MirrorOrder
    reports: SimpleQueue[MirrorReport] = field(default_factory=SimpleQueue)
    last: MirrorReport | None = None
    process: "subprocess.Popen[bytes] | None" = None
    _listener: threading.Thread | None = None
    _problem: str = ""
    """Last reported problem."""
    _news: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the tracker in messages."""
        return self.order.tracker.label

    def request_sync(self) -> None:
        """Request the process to look for new data, without waiting for it."""
        if self.process is None or self.process.poll() is not None:
            self._start()
        with suppress(OSError):  # the process has ended, which its last report or the next call shows
            os.write(self._stdin, b"\n")

    def end(self) -> None:
        """Request the process to mirror the remaining data and end."""
        if self.process is not None and self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()

    def wait(self) -> None:
        """Wait until the process ends. A process that is silent for too long ends by itself or is killed."""
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
        """Return the problems that were not returned before. A problem is returned once, until it changes."""
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
                MirrorReport(tracker=self.name, problem=f"the process of the tracker ended with exit code {code}")
            )


class TrackerProcesses:
    """Trackers of one run, as used by the process that trains or reads the run."""

    def __init__(self, command: Sequence[str], orders: Sequence[MirrorOrder]) -> None:
        """Prepare the trackers. Their processes start at the first call of `request_sync`."""
        self.mirrors = [MirrorProcess(command, order) for order in orders]

    def request_sync(self) -> None:
        """Request all trackers to look for new data, without waiting for them."""
        for mirror in self.mirrors:
            mirror.request_sync()

    def warnings(self) -> list[str]:
        """Return one line for each new problem."""
        return [
            f"tracker {mirror.name!r} is not up to date: {line}"
            for mirror in self.mirrors
            for line in mirror.new_problems()
        ]

    def finish(self) -> list[MirrorReport]:
        """Request all trackers to mirror the remaining data, wait until they end, and return the last report
        of each."""
        for mirror in self.mirrors:
            mirror.request_sync()
            mirror.end()
        for mirror in self.mirrors:
            mirror.wait()
        return [_last(mirror) for mirror in self.mirrors]


def _last(mirror: MirrorProcess) -> MirrorReport:
    silent = MirrorReport(tracker=mirror.name, problem="the process of the tracker did not respond")
    last = mirror.last or silent
    return last if last.is_over or last.problem else last.model_copy(update={"problem": silent.problem})


def send(report: MirrorReport, to: int) -> None:
    """Write a report to a file descriptor. Nothing happens if the reader was killed."""
    line: JsonValue = report.model_dump(mode="json", exclude_defaults=True)
    with suppress(BrokenPipeError):
        os.write(to, json.dumps(line).encode() + b"\n")
