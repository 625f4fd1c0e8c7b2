"""What a run that is open in this process has told Prefect's pages, and is to tell them next."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from math import inf


@dataclass(slots=True)
class Pages:
    """What Prefect's pages are to show next of a run's iterations."""

    newest: tuple[int, str] | None = None
    """The last one that was reported and its line; none where they show it."""
    reported: int = 0
    """Number of the last iteration that was reported."""
    renewed: float = -inf
    """When they were last, on the monotonic clock."""
    summarised: int = 0
    """Number of the last iteration that plot, samples and summary show."""
    renewing: asyncio.Task[None] | None = None
    """The renewal of these that is under way."""

    def renew(self, renewal: Coroutine[object, object, None]) -> None:
        """Begin to renew plot, samples and summary beside what goes on, unless that is under way already."""
        if self.renewing is not None and not self.renewing.done():
            renewal.close()
            return
        self.renewing = asyncio.create_task(renewal, name="renew the summary")

    def settle(self) -> None:
        """Give up a renewal that is under way: what comes shows more."""
        if self.renewing is not None:
            self.renewing.cancel()
