"""Bookkeeping of what Prefect's pages show of a run that is open in this process."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from math import inf


@dataclass(slots=True)
class Pages:
    """State of the Prefect pages that show a run's iterations."""

    newest: tuple[int, str] | None = None
    """Number and text line of the last reported iteration, or None if the pages already show it."""
    reported: int = 0
    """Number of the last iteration that was reported."""
    renewed: float = -inf
    """Time of the last renewal of the pages, on the monotonic clock."""
    summarised: int = 0
    """Number of the last iteration that the plot, samples and summary include."""
    renewing: asyncio.Task[None] | None = None
    """Task that is renewing the plot, samples and summary, if any."""

    def renew(self, renewal: Coroutine[object, object, None]) -> None:
        """Start renewing the plot, samples and summary in the background, unless a renewal is running already."""
        if self.renewing is not None and not self.renewing.done():
            renewal.close()
            return
        self.renewing = asyncio.create_task(renewal, name="renew the summary")

    def settle(self) -> None:
        """Cancel a running renewal, because the next renewal shows newer data."""
        if self.renewing is not None:
            self.renewing.cancel()
