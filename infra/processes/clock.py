"""Clock for the time limits of calls on shared machines. It only counts time in which the process could run."""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

SHORTEST_SLICE: Final = 0.05
LONGEST_SLICE: Final = 1.0
"""Longest interval in seconds between two measurements of a process's CPU use. `SHORTEST_SLICE` is the shortest
interval."""
SLICES: Final = 100
"""Number of times that a process's CPU use is measured within the time limit of a call. For very short and very long
limits, the interval between measurements is limited by `SHORTEST_SLICE` and `LONGEST_SLICE`, which changes this
number."""


class CallClock:
    """Clock for the time limit of a call. It only counts time in which the process could run, and not time spent
    waiting for a busy CPU. For this, it measures the CPU use of the process at regular intervals."""

    def __init__(self, pid: int, seconds: float) -> None:
        """Start the clock for a process. `seconds` is the time limit of the call."""
        self.slice = min(max(SHORTEST_SLICE, seconds / SLICES), LONGEST_SLICE)
        """Interval between two measurements of the process, in seconds."""
        self.used = 0.0
        """CPU seconds that the process and its descendants have used during the call."""
        self._pid = pid
        self._counted = 0.0
        self._began = self._last = time.monotonic()
        self._before: float | None = None

    @property
    def elapsed(self) -> float:
        """Seconds since the call began."""
        return time.monotonic() - self._began

    def counted_seconds(self) -> float:
        """Return the seconds since the start of the call in which the process could run. Time that it spent waiting for
        a busy CPU is not counted."""
        now = time.monotonic()
        elapsed = now - self._last
        if elapsed < self.slice:
            return self._counted + elapsed
        self._last = now
        lived = min(elapsed, 2 * self.slice)  # this process may have been suspended
        cpu, runs = _usage(self._pid)
        used = 0.0 if self._before is None else max(0.0, cpu - self._before)
        self.used += used
        waits = runs and self._before is not None  # for a CPU; a process that sleeps or is stopped could run
        self._before = cpu
        self._counted += min(lived, used) if waits else lived
        return self._counted


def _usage(pid: int) -> tuple[float, bool]:
    """Return the CPU seconds that a process and its descendants have used, and whether any of them is running or
    waiting for a CPU."""
    cpu, runs = 0.0, False
    for each in process_tree(pid):
        with suppress(psutil.Error):
            process = psutil.Process(each)
            cpu += sum(process.cpu_times()[:4])  # user, system, and those of ended children
            runs |= process.status() == psutil.STATUS_RUNNING
    return cpu, runs


def process_tree(pid: int) -> Iterator[int]:
    """Yield the ids of a process and all its descendants. On Linux this reads only these processes, which is faster
    than a search through all processes."""
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        yield parent
        try:
            tasks = Path(f"/proc/{parent}/task").iterdir()
            waiting += map(int, " ".join((task / "children").read_text() for task in tasks).split())
        except OSError:  # the process has ended, or the system has no such file
            with suppress(psutil.Error):
                waiting += (child.pid for child in psutil.Process(parent).children())
