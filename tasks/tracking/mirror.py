"""Process that sends a run's metrics to one tracker: `python -m rheostat.tasks.tracking.mirror`.

The process reads a `MirrorOrder` from stdin. Each further line requests a check of the run. A check compares the store
with the tracker and sends everything that the tracker lacks, so an earlier process may have stopped at any point. When
stdin ends, the process does a last check and exits.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final, cast

from rheostat.infra.config import fingerprint_of
from rheostat.infra.errors import BadInput, RheostatError
from rheostat.infra.store.runs import TRACKERS, Run, open_run
from rheostat.infra.trackers.config import Tracker
from rheostat.infra.trackers.processes import STUCK, MirrorOrder, MirrorReport, TrackerProcesses, send
from rheostat.infra.trackers.records import Mirror, OpenMirror, Product
from rheostat.infra.variants import implementation_of
from rheostat.models.records.versions import policy_of
from rheostat.tasks.run.reverts import policy_after
from rheostat.tasks.tracking.points import PointName, points_after, read_point, subject_of

COMMAND: Final = (sys.executable, "-P", "-m", "rheostat.tasks.tracking.mirror")
"""Command of the process. `-P` prevents that a user's module in the working directory is imported."""
PATIENCE_SECONDS = 60.0
"""Time in seconds that a run waits at its end for a tracker that neither responds nor uses processor time."""
RETRY_SECONDS: Final = 30.0
"""Maximum pause in seconds before a failed tracker is tried again. A new iteration triggers a try at once."""
COMPUTES_SECONDS: Final = 0.02  # processor seconds between two checks; a waiting thread uses less
SHOWN: Final = 300  # characters of an error message


def tracker_processes_of(run: Run, trackers: Sequence[Tracker]) -> TrackerProcesses:
    """Return one process for each tracker of a run. The processes are not started yet."""
    home = run.store.uri.rpartition("/")[0]
    patience = PATIENCE_SECONDS
    orders = [MirrorOrder(store=home, run=run.name, tracker=each, patience_seconds=patience) for each in trackers]
    return TrackerProcesses(COMMAND, orders)


class Watchdog:
    """Watchdog that ends this process if a call to the tracker does not return. The process must end, because some
    calls cannot be interrupted."""

    def __init__(self, seconds: float, lose: Callable[[str], None]) -> None:
        """Start the watchdog thread. `lose` is called with the reason before the process ends."""
        self._seconds, self._lose = seconds, lose
        self._began: float | None = None
        self.is_last = False
        """Whether the run has ended and waits for this process."""
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def begin(self) -> None:
        """Note the time, because a call to the tracker starts or has made progress."""
        self._began = time.monotonic()

    def pause(self) -> None:
        """Note that no call to the tracker is in progress, so nothing has to be watched."""
        self._began = None

    def _watch(self) -> None:
        alive, computed = time.monotonic(), time.process_time()
        while True:
            time.sleep(min(1.0, self._seconds / 4))
            now, spent, began = time.monotonic(), time.process_time(), self._began
            # imports are slow if many processes import at the same time
            if spent - computed > COMPUTES_SECONDS or began is None:
                alive = now
            computed = spent
            max_seconds = self._seconds * STUCK
            silent = 0.0 if began is None else now - max(began, alive)
            if began is not None and (
                silent > (self._seconds if self.is_last else max_seconds) or now - began > max_seconds
            ):
                self._lose(f"no answer for {now - began:.0f} s")
                os._exit(0)


class RequestReader:
    """Thread that reads check requests from stdin and wakes the mirror."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._news, self._watchdog = threading.Event(), watchdog
        self.are_over = False
        threading.Thread(target=self._read, name="looks", daemon=True).start()

    def wait(self, seconds: float | None) -> None:
        """Wait until a check is requested, stdin has ended, or `seconds` have passed."""
        self._news.wait(seconds)
        self._news.clear()

    def _read(self) -> None:
        for _ in sys.stdin.buffer:
            self._news.set()
        self.are_over = self._watchdog.is_last = True
        self._news.set()


class TrackerSync:
    """Synchronization of one run to one tracker. It sends the points (metrics of an iteration or evaluation) that the
    tracker lacks."""

    def __init__(self, order: MirrorOrder, report_descriptor: int) -> None:
        """Open the run. `report_descriptor` is the file descriptor to which reports for the training process are
        written."""
        self._order, self._report_descriptor = order, report_descriptor
        self._run: Run = open_run(order.store, order.run)
        self._mirror: Mirror | None = None
        self._tracker_lock = ExitStack()
        """Lock on the tracker. Without it, two processes could both send the same points."""
        self._has_lock = False
        self._last: PointName | None = None
        """Last point that the tracker has received, or None if it is unknown."""
        self._points = 0
        self.watchdog = Watchdog(order.patience_seconds, self._lose)

    def catch_up(self) -> bool:
        """Send new points to the tracker and report the result; return whether it succeeded. After any error the
        tracker is opened again in the next call."""
        try:
            self.watchdog.begin()
            self._send_points()
            self._report()
            return True
        except Exception as error:
            self._mirror, self._last = None, None
            self._lose(_describe_error(error))
            return False
        finally:
            self.watchdog.pause()

    def close(self) -> None:
        """Close the tracker after all points have arrived. If the run is finished, the tracker also receives its final
        policy."""
        try:
            self.watchdog.begin()
            if self._mirror is not None:
                self._mirror.close(final_policy_of(self._run))
            self._report(is_over=True)
        except Exception as error:
            self._lose(_describe_error(error))

    def _send_points(self) -> None:
        self._lock_tracker()
        if self._mirror is None:
            open_mirror = cast(OpenMirror, implementation_of(self._order.tracker))
            self._mirror = open_mirror(subject_of(self._run), self._order.tracker)
        for place in points_after(self._run, self._last):
            point = read_point(self._run, place, samples=self._order.tracker.samples)
            if self._mirror.lacks(point):
                self._mirror.write(point, None if point.samples is None else point.samples())
                self._points += 1
            self._last = place
            self.watchdog.begin()
            self._report()

    def _lock_tracker(self) -> None:
        if not self._has_lock:
            name = fingerprint_of(self._order.model_dump(mode="json", include={"tracker"}))
            self._has_lock = self._tracker_lock.enter_context(self._run.store.lock(f"{TRACKERS}{name}")) is not None
            if not self._has_lock:
                self._tracker_lock.close()
                raise BadInput(
                    "another process, such as the one that trains the run, already sends metrics to this tracker. "
                    "Wait until that process ends, or send to another tracker."
                )

    def _report(self, *, is_over: bool = False) -> None:
        self._send(MirrorReport(tracker=self._order.tracker.label, is_over=is_over))

    def _lose(self, problem: str) -> None:
        self._send(MirrorReport(tracker=self._order.tracker.label, problem=problem))

    def _send(self, report: MirrorReport) -> None:
        step = None if self._last is None else self._last.step
        send(report.model_copy(update={"points": self._points, "step": step}), self._report_descriptor)


def final_policy_of(run: Run) -> Product | None:
    """Return the final policy of a run for the tracker, or None if the run is not finished (the last iteration is not
    evaluated)."""
    places = [*points_after(run, None)]
    if not places or places[-1].series != "evaluation" or not places[-1].step:
        return None
    policy = policy_of(policy_after(run, places[-1].step))
    return Product(places[-1].step, policy.digest, f"{run.store.uri}/{(policy.adapter or policy.weights).key}")


def _describe_error(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no reason given"
    return (text if isinstance(error, RheostatError) else f"{type(error).__name__}: {text}")[:SHOWN]


def main() -> None:
    """Run the process: send new metrics whenever a check is requested, until stdin ends, and then check a last time."""
    report_descriptor = os.dup(1)
    os.dup2(2, 1)  # output of libraries must not mix with the reports
    order = MirrorOrder.model_validate_json(sys.stdin.buffer.readline())
    sync = TrackerSync(order, report_descriptor)
    news = RequestReader(sync.watchdog)
    while not news.are_over:
        news.wait(None if sync.catch_up() else RETRY_SECONDS)
    if sync.catch_up():
        sync.close()
    os._exit(0)  # a normal exit would wait for threads and servers of libraries


if __name__ == "__main__":
    main()
