"""Record of the iterations that a run's pages in Prefect already show, so that pages are updated only if necessary."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from math import inf


@dataclass(slots=True)
class PrefectPages:
    """Progress of updating a run's pages in Prefect."""

    pending_line: tuple[int, str] | None = None
    """Number and log line of an iteration that the pages do not show yet, or None."""
    last_reported: int = 0
    """Number of the last iteration that was reported."""
    last_renewal_time: float = -inf
    """Time of the last update of the pages in seconds of the monotonic clock."""
    last_summarized: int = 0
    """Last iteration that is included in the plot, the samples and the summary."""
    renewal_task: asyncio.Task[None] | None = None
    """Task that is updating the plot, the samples and the summary, or None."""

    def start_renewal(self, renewal: Coroutine[object, object, None]) -> None:
        """Start to update the plot, the samples and the summary in the background, unless such an update is running."""
        if self.renewal_task is not None and not self.renewal_task.done():
            renewal.close()
            return
        self.renewal_task = asyncio.create_task(renewal, name="renew the summary")

    def cancel_renewal(self) -> None:
        """Cancel a running update. The caller is about to publish newer data."""
        if self.renewal_task is not None:
            self.renewal_task.cancel()
