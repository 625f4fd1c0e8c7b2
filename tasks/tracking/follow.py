"""Metrics of a run in places outside the store's records: `metrics.jsonl`, and trackers such as MLflow or W&B.

A failure here never stops or delays the run. It is logged as a warning, and `rheostat track` can catch up later.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar

from rheostat.infra.errors import RheostatError
from rheostat.infra.store.runs import Run
from rheostat.infra.trackers.processes import TrackerProcesses
from rheostat.tasks.run.open_run import OpenRun
from rheostat.tasks.run.stages import stage
from rheostat.tasks.tracking.metrics_file import extend_metrics, rewrite_metrics
from rheostat.tasks.tracking.mirror import tracker_processes_of

logger = logging.getLogger(__name__)

_TRACKERS: ContextVar[TrackerProcesses | None] = ContextVar("trackers", default=None)
"""Tracker processes of the run that is open in this context, or None if the run has no trackers."""


def update_metrics_file(run: Run, *, is_over: bool = False) -> None:
    """Append metrics of new iterations and evaluations to `metrics.jsonl`. In a bucket, where objects cannot grow, the
    file is written when the run is over."""
    try:
        if run.store.traits.can_append:
            extend_metrics(run)
        elif is_over:
            rewrite_metrics(run)
    except RheostatError as error:
        logger.warning("metrics.jsonl is not up to date: %s", error)


async def track_iteration(open_run: OpenRun, number: int) -> None:
    """Let the trackers send the metrics of a completed iteration. Does nothing if the run has no trackers."""
    if (trackers := _TRACKERS.get()) is not None:
        await _notify_trackers(open_run, trackers, number)


@stage("track it-{number:04d}")
async def _notify_trackers(open_run: OpenRun, trackers: TrackerProcesses, number: int) -> None:
    trackers.request_sync()
    _log_warnings(trackers)


@asynccontextmanager
async def mirror_to_trackers(open_run: OpenRun) -> AsyncIterator[None]:
    """Send the run's metrics to its trackers during the block. At the end, even after an error, wait for the remaining
    metrics to arrive as long as the trackers respond."""
    if not open_run.settings.tracking:
        yield
        update_metrics_file(open_run.run, is_over=True)
        return
    trackers = tracker_processes_of(open_run.run, open_run.settings.tracking)
    token = _TRACKERS.set(trackers)
    trackers.request_sync()
    try:
        yield
        update_metrics_file(open_run.run, is_over=True)
    finally:
        _TRACKERS.reset(token)
        await _finish_trackers(open_run, trackers)


async def _finish_trackers(open_run: OpenRun, trackers: TrackerProcesses) -> None:
    reports = await asyncio.get_running_loop().run_in_executor(None, trackers.finish)
    _log_warnings(trackers)
    for behind in (report.tracker for report in reports if report.problem):
        command = f"rheostat track {open_run.run.name} --tracking CONFIG"
        logger.warning("tracker %r is missing a part of the run. Send it with `%s`", behind, command)


def _log_warnings(trackers: TrackerProcesses) -> None:
    for line in trackers.warnings():
        logger.warning("%s; the run continues", line)
