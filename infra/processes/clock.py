"""The time of a call that counts: what a process could have used, on a machine that others use as well."""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

SHORTEST_SLICE: Final = 0.05
LONGEST_SLICE: Final = 1.0
"""Seconds between two looks at a process."""
SLICES: Final = 100
"""Looks in a call's time, where that is in between."""


class CallClock:
    """Counts the time of a call, in slices; what it used of processors is known from the second on."""

    def __init__(self, pid: int, seconds: float) -> None:
        """Begin to count for a process; `seconds` are what the call may take."""
        self.slice = min(max(SHORTEST_SLICE, seconds / SLICES), LONGEST_SLICE)
        """Seconds between two looks at the process."""
        self.used = 0.0
        """Seconds of processors, of the process and what it started."""
        self._pid = pid
        self._counted = 0.0
        self._began = self._last = time.monotonic()
        self._before: float | None = None

    @property
    def lasted(self) -> float:
        """Seconds since the call began."""
        return time.monotonic() - self._began

    def counted(self) -> float:
        """Return the seconds that count so far."""
        now = time.monotonic()
        elapsed = now - self._last
        if elapsed < self.slice:
            return self._counted + elapsed
        self._last = now
        lived = min(elapsed, 2 * self.slice)  # this process may have stood still
        cpu, runs = _usage(self._pid)
        used = 0.0 if self._before is None else max(0.0, cpu - self._before)
        self.used += used
        waits = runs and self._before is not None  # for a processor; what sleeps or is stopped may use its time
        self._before = cpu
        self._counted += min(lived, used) if waits else lived
        return self._counted


def _usage(pid: int) -> tuple[float, bool]:
    """Return what a process and its descendants have used of processors, and whether one of them could use more."""
    cpu, runs = 0.0, False
    for each in family_of(pid):
        with suppress(psutil.Error):
            process = psutil.Process(each)
            cpu += sum(process.cpu_times()[:4])  # user, system, and those of children that have ended
            runs |= process.status() == psutil.STATUS_RUNNING
    return cpu, runs


def family_of(pid: int) -> Iterator[int]:
    """Name a process and its descendants. On Linux only these are looked at: hundreds of calls ask often."""
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        yield parent
        try:
            tasks = Path(f"/proc/{parent}/task").iterdir()
            waiting += map(int, " ".join((task / "children").read_text() for task in tasks).split())
        except OSError:  # it has ended, or there is no such file here
            with suppress(psutil.Error):
                waiting += (child.pid for child in psutil.Process(parent).children())
