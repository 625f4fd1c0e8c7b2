"""Clock that detects when workers have stopped making progress."""

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class StallClock:
    """Clock that runs out if no worker that reports to it makes progress for `seconds`. Workers that wait for each
    other, such as the ranks of a group, share one clock."""

    seconds: float
    _counts: dict[str, object] = field(default_factory=dict)
    """Latest progress counter of each worker, by name of the worker."""
    _moved: float = field(default_factory=time.monotonic)
    """Time of the latest progress of any worker."""

    def report(self, worker: str, count: object) -> None:
        """Record a worker's progress counter. If the counter has changed, or is the first one, the clock starts
        again."""
        if self._counts.get(worker) != count:
            self._counts[worker], self._moved = count, time.monotonic()

    @property
    def remaining(self) -> float:
        """Seconds until the clock runs out, or a number of at most 0 if it has run out."""
        return self._moved + self.seconds - time.monotonic()
