"""Timing of environments: the seconds in which they answered, and the seconds in which no episode generated text."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class EnvironmentClock:
    """Timer that shows how much environments slow down generation. It sums the seconds in which environments compute
    answers, and the idle seconds in which no turn is generated.

    Threads may generate turns at the same time.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._since: float | None = None
        self._interruptions = 0
        self._seconds = 0.0
        self._answering = 0.0

    @contextmanager
    def measure_idle(self) -> Iterator[None]:
        """Run the block, and count its time as idle, except the time inside `pause_idle`."""
        self._since = time.perf_counter()
        try:
            yield
        finally:
            self._pause()

    @contextmanager
    def pause_idle(self) -> Iterator[None]:
        """Run the block, in which a turn is generated, without counting its time as idle."""
        with self._lock:
            self._interruptions += 1
            self._pause()
        try:
            yield
        finally:
            with self._lock:
                self._interruptions -= 1
                if not self._interruptions:
                    self._since = time.perf_counter()

    def _pause(self) -> None:
        """Stop measuring idle time, and add the seconds since the measurement was started or resumed."""
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None

    def add_answer_time(self, seconds: float) -> None:
        """Add the seconds that environments took to answer."""
        with self._lock:
            self._answering += seconds

    def pop_times(self) -> dict[str, float]:
        """Return the idle seconds and the environments' answering seconds since the last call, by metric name, and
        reset both sums."""
        seconds = {"environment": self._seconds, "answering": self._answering}
        self._seconds = self._answering = 0.0
        return seconds
