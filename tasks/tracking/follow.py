"""Publication of a run's progress outside its store: `metrics.jsonl` and trackers.

A failure here never stops or delays the run. It is logged as a warning, and `rheostat track` can catch up later.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar

from infra.errors import RheostatError
from infra.store.runs import Run
from infra.trackers.feed import TrackerProcesses
from tasks.run.session import Session
from tasks.run.stages import stage
from tasks.tracking.metrics_file import extend_metrics, renew_metrics
from tasks.tracking.mirror import feed_of

logger = logging.getLogger(__name__)

_FEED: ContextVar[TrackerProcesses | None] = ContextVar("feed", default=None)
"""Trackers of the run that is open in this context, or None if it has none."""


def note_metrics(run: Run, *, is_over: bool = False) -> None:
    """Append new numbers to `metrics.jsonl`. In a bucket, where objects cannot grow, the file is written when the run
    is over."""
    try:
        if not run.store.is_remote:
            extend_metrics(run)
        elif is_over:
            renew_metrics(run)
    except RheostatError as error:
        logger.warning("metrics.jsonl is not up to date: %s", error)


async def track_iteration(session: Session, number: int) -> None:
    """Notify the trackers, if any, of a sealed iteration."""
    if (feed := _FEED.get()) is not None:
        await _notify_trackers(session, feed, number)


@stage("track it-{number:04d}")
async def _notify_trackers(session: Session, feed: TrackerProcesses, number: int) -> None:
    feed.poll()
    _log_warnings(feed)


@asynccontextmanager
async def tracked(session: Session) -> AsyncIterator[None]:
    """Mirror the run to its trackers during the block. At the end, even after an error, the trackers may catch up as
    long as they respond."""
    if not session.settings.tracking:
        yield
        note_metrics(session.run, is_over=True)
        return
    feed = feed_of(session.run, session.settings.tracking)
    token = _FEED.set(feed)
    feed.poll()
    try:
        yield
        note_metrics(session.run, is_over=True)
    finally:
        _FEED.reset(token)
        await _finish_trackers(session, feed)


async def _finish_trackers(session: Session, feed: TrackerProcesses) -> None:
    reports = await asyncio.get_running_loop().run_in_executor(None, feed.finish)
    _log_warnings(feed)
    for behind in (report.tracker for report in reports if report.problem):
        command = f"rheostat track {session.run.name} --tracking CONFIG"
        logger.warning("tracker %r is missing a part of the run. Send it with `%s`", behind, command)


def _log_warnings(feed: TrackerProcesses) -> None:
    for line in feed.warnings():
        logger.warning("%s; the run continues", line)
