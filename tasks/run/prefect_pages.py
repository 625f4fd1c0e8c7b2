"""State of the Prefect pages of a run that is open in this process: the iterations that the pages already show."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from math import inf


@dataclass(slots=True)
class PrefectPages:
    """State of the Prefect pages that show a run's iterations."""

    pending_line: tuple[int, str] | None = None
    """Number and text line of the last reported iteration, or None if the pages already show it."""
    last_reported: int = 0
    """Number of the last iteration that was reported."""
    last_renewal_time: float = -inf
    """Time of the last renewal of the pages, on the monotonic clock."""
    last_summarized: int = 0
    """Number of the last iteration that the plot, samples and summary include."""
    renewal_task: asyncio.Task[None] | None = None
    """Task that is renewing the plot, samples and summary, if any."""

    def start_renewal(self, renewal: Coroutine[object, object, None]) -> None:
        """Start renewing the plot, samples and summary in the background, unless a renewal is running already."""
        if self.renewal_task is not None and not self.renewal_task.done():
            renewal.close()
            return
        self.renewal_task = asyncio.create_task(renewal, name="renew the summary")

    def cancel_renewal(self) -> None:
        """Cancel a running renewal, because the next renewal shows newer data."""
        if self.renewal_task is not None:
            self.renewal_task.cancel()
