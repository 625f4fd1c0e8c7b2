"""How long environments took to answer, and how long a policy had nothing to write for it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class EnvironmentClock:
    """Counts the seconds of answers, and those in which nobody writes; threads may write at the same time."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._since: float | None = None
        self._interruptions = 0
        self._seconds = 0.0
        self._answering = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Take it that nobody writes."""
        self._since = time.perf_counter()
        try:
            yield
        finally:
            self._pause()

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Take it that somebody does."""
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
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None

    def answered(self, seconds: float) -> None:
        """Count what an answer took."""
        with self._lock:
            self._answering += seconds

    def taken(self) -> dict[str, float]:
        """Return the seconds in which nobody wrote, and those of answers, since this was asked last."""
        told = {"environment": self._seconds, "answering": self._answering}
        self._seconds = self._answering = 0.0
        return told
