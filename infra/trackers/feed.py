"""The processes that mirror a run, one for each tracker: what hangs or breaks there is nobody else's trouble.

A tracker's library starts threads, hooks and servers of its own, takes seconds to import, and may wait for its service
for ever. Here none of that happens in the process that trains.
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
"""How many times its patience a process may be without a word that computes, or whose run still trains."""
_MORE_SECONDS = 5.0  # in which a process that has lost patience with itself ends


class MirrorOrder(Settings):
    """What a process is to mirror, and where."""

    store: str
    """Where runs lie."""
    run: str
    """Name of the run."""
    tracker: TrackerConfig
    """Where it is mirrored."""
    patience_seconds: float
    """How long it may be without a word and compute nothing, when nothing else is waited for."""


class MirrorReport(Settings):
    """A line that such a process writes."""

    tracker: str
    """What messages call it."""
    points: int = 0
    """Iterations and evaluations that this process has brought there."""
    step: int | None = None
    """The last one; none where there was none yet."""
    problem: str = ""
    """Why it does not go on; empty where it does."""
    is_over: bool = False
    """Whether it has all that there is, and the process ends."""


@dataclass(slots=True)
class MirrorProcess:
    """One tracker's process, which begins anew when it is needed and gone."""

    command: Sequence[str]
    """Its stdin is the order, and then a line for each look."""
    order: MirrorOrder
    reports: SimpleQueue[MirrorReport] = field(default_factory=SimpleQueue)
    last: MirrorReport | None = None
    process: "subprocess.Popen[bytes] | None" = None
    _listener: threading.Thread | None = None
    _problem: str = ""
    """The one that was told last."""
    _news: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.order.tracker.known_as

    def look(self) -> None:
        """Have it look for what is new; it never keeps the caller waiting."""
        if self.process is None or self.process.poll() is not None:
            self._start()
        with suppress(OSError):  # it is gone, which its last report or the next look says
            os.write(self._stdin, b"\n")

    def end(self) -> None:
        """Have it bring over what there is, and end."""
        if self.process is not None and self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()

    def wait(self) -> None:
        """Wait for its end; it ends by itself once it has been without a word for too long, or is ended."""
        process = self.process
        if process is None:
            return
        while process.poll() is None:
            before = self.last
            with suppress(subprocess.TimeoutExpired):
                process.wait(STUCK * self.order.patience_seconds + _MORE_SECONDS)
            self._hear()
            if self.last is before:
                break
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it started, too
        process.wait()
        if self._listener is not None:
            self._listener.join(_MORE_SECONDS)
        self._hear()

    def news(self) -> list[str]:
        """Return what is new and worth a warning: a problem once, until there is another or none."""
        self._hear()
        told, self._news = self._news, []
        return told

    def _hear(self) -> None:
        with suppress(Empty):
            while True:
                report = self.last = self.reports.get_nowait()
                if report.problem and report.problem != self._problem:
                    self._news.append(report.problem)
                self._problem = report.problem

    @property
    def _stdin(self) -> int:
        assert self.process is not None and self.process.stdin is not None, "it was started with a pipe"
        return self.process.stdin.fileno()

    def _start(self) -> None:
        self.end()
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is the run's affair, which then ends this in order
        )
        os.write(self._stdin, self.order.model_dump_json().encode() + b"\n")  # fits a pipe that nobody has read yet
        os.set_blocking(self._stdin, False)
        self._listener = threading.Thread(target=self._listen, args=(self.process,), name=self.name, daemon=True)
        self._listener.start()

    def _listen(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None, "it was asked for"
        report = TypeAdapter(MirrorReport)
        for line in process.stdout:
            with suppress(ValidationError):
                self.reports.put(report.validate_json(line))
        if (code := process.wait()) != 0:
            self.reports.put(MirrorReport(tracker=self.name, problem=f"its process ended with code {code}"))


class Feed:
    """The trackers of one run, as the process that makes or reads it sees them."""

    def __init__(self, command: Sequence[str], orders: Sequence[MirrorOrder]) -> None:
        """Name them; none is started before the first look."""
        self.mirrors = [MirrorProcess(command, order) for order in orders]

    def look(self) -> None:
        """Have all of them look for what is new, and wait for none."""
        for mirror in self.mirrors:
            mirror.look()

    def warnings(self) -> list[str]:
        """What is new and wrong, a line each."""
        return [
            f"tracker {mirror.name!r} is not up to date: {line}" for mirror in self.mirrors for line in mirror.news()
        ]

    def finish(self) -> list[MirrorReport]:
        """Have all of them bring over what there is, wait for their ends, and return the last report of each."""
        for mirror in self.mirrors:
            mirror.look()
            mirror.end()
        for mirror in self.mirrors:
            mirror.wait()
        return [_last(mirror) for mirror in self.mirrors]


def _last(mirror: MirrorProcess) -> MirrorReport:
    silent = MirrorReport(tracker=mirror.name, problem="it gave no answer")
    last = mirror.last or silent
    return last if last.is_over or last.problem else last.model_copy(update={"problem": silent.problem})


def send(report: MirrorReport, to: int) -> None:
    """Write a report, in the process that makes it; who wanted to read it may have been killed."""
    line: JsonValue = report.model_dump(mode="json", exclude_defaults=True)
    with suppress(BrokenPipeError):
        os.write(to, json.dumps(line).encode() + b"\n")
