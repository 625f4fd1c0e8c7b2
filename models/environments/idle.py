"""How long a policy had nothing to write, since environments had yet to answer."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock


class IdleClock:
    """Runs while nobody interrupts it; threads that do so at the same time interrupt it once."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._since: float | None = None
        self._interruptions = 0
        self._seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let it run."""
        self._since = time.perf_counter()
        try:
            yield
        finally:
            self._pause()

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Let it stand."""
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

    def taken(self) -> float:
        """Return the seconds since this was asked last."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
