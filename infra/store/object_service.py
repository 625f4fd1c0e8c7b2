"""Facts about object services, time limits of requests to them, and counts of the requests."""

from collections import Counter
from dataclasses import dataclass
from threading import Lock
from typing import Final


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time limits for requests to a server."""

    answer_seconds: float = 60
    """Time limit in seconds for a response, or for the next bytes of a response."""
    total_seconds: float = 120
    """Time limit in seconds for one operation, including all retries."""


TIMEOUTS: Final = Timeouts()


@dataclass(frozen=True, slots=True)
class Service:
    """Facts in which object services differ."""

    page: str
    """Page of the documentation about the service."""
    bucket: str
    """Word of the service for a bucket."""
    page_names: int
    """Maximum number of object names in one response (page) of a listing."""
    missing_bucket: str
    """Error code of requests to a bucket that does not exist."""
    credentials: str
    """Sentence that says how to set credentials, for messages."""


class Requests:
    """Thread-safe counter of requests by HTTP verb."""

    def __init__(self) -> None:
        self._turn, self._counts = Lock(), Counter[str]()

    def add(self, verb: str, count: int = 1) -> None:
        """Count requests with this HTTP verb that are about to be sent."""
        with self._turn:
            self._counts[verb] += count

    def counts(self) -> dict[str, int]:
        """Return the number of requests so far, by HTTP verb."""
        with self._turn:
            return dict(self._counts)
