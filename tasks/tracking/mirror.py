"""Mirror a run to one tracker: `python -m tasks.tracking.mirror`, given a `MirrorOrder` and then a line for each look.

Everything comes from the store, so it does not matter what was mirrored before, by whom, or whether that was finished:
what a tracker lacks is brought there. It ends when its stdin does, after a last look.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final, cast

from infra.config import fingerprint_of
from infra.errors import BadInput, RheostatError
from infra.store.runs import TRACKERS, Run, open_run
from infra.trackers.config import Tracker
from infra.trackers.feed import STUCK, Feed, MirrorOrder, MirrorReport, send
from infra.trackers.records import Mirror, OpenMirror, Product
from infra.variants import implementation_of
from models.records.versions import policy_of
from tasks.run.returns import policy_after
from tasks.tracking.points import PointName, places_after, point_at, subject_of

COMMAND: Final = (sys.executable, "-P", "-m", "tasks.tracking.mirror")
"""`-P`: a user's module in the working directory is not ours."""
PATIENCE_SECONDS = 60.0
"""How long the end of a run waits for a tracker that says and computes nothing."""
RETRY_SECONDS: Final = 30.0
"""Longest pause before a tracker that failed is tried again; a new iteration is tried at once."""
COMPUTES_SECONDS: Final = 0.02  # of a processor between two looks; a thread that waits takes less
SHOWN: Final = 300  # characters of an error


def feed_of(run: Run, trackers: Sequence[Tracker]) -> Feed:
    """Name the processes that mirror a run."""
    home = run.store.uri.rpartition("/")[0]
    patience = PATIENCE_SECONDS
    orders = [MirrorOrder(store=home, run=run.name, tracker=each, patience_seconds=patience) for each in trackers]
    return Feed(COMMAND, orders)


class Watchdog:
    """Ends this process where a call does not return: it may be one that nothing can interrupt."""

    def __init__(self, seconds: float, lose: Callable[[str], None]) -> None:
        """Watch from a thread of its own; `lose` is told why before the end."""
        self._seconds, self._lose = seconds, lose
        self._began: float | None = None
        self.is_last = False
        """Whether nothing but this is waited for."""
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def begin(self) -> None:
        """Say that a call is under way, or that one has come so far."""
        self._began = time.monotonic()

    def rest(self) -> None:
        """Say that none is."""
        self._began = None

    def _watch(self) -> None:
        alive, computed = time.monotonic(), time.process_time()
        while True:
            time.sleep(min(1.0, self._seconds / 4))
            now, spent, began = time.monotonic(), time.process_time(), self._began
            if spent - computed > COMPUTES_SECONDS or began is None:  # importing takes long where many do it
                alive = now
            computed = spent
            most = self._seconds * STUCK
            silent = 0.0 if began is None else now - max(began, alive)
            if began is not None and (silent > (self._seconds if self.is_last else most) or now - began > most):
                self._lose(f"no answer for {now - began:.0f} s")
                os._exit(0)


class Looks:
    """Wakes who mirrors when there is something new, from a thread that reads stdin."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._news, self._watchdog = threading.Event(), watchdog
        self.are_over = False
        threading.Thread(target=self._read, name="looks", daemon=True).start()

    def wait(self, seconds: float | None) -> None:
        """Return when there is something new, when there will be no more, or after so long."""
        self._news.wait(seconds)
        self._news.clear()

    def _read(self) -> None:
        for _ in sys.stdin.buffer:
            self._news.set()
        self.are_over = self._watchdog.is_last = True
        self._news.set()


class Mirroring:
    """One run on its way to one tracker."""

    def __init__(self, order: MirrorOrder, told: int) -> None:
        """Open the run; `told` is the descriptor that reports go to."""
        self._order, self._told = order, told
        self._run: Run = open_run(order.store, order.run)
        self._mirror: Mirror | None = None
        self._turn = ExitStack()
        """Holds the tracker for this process: two would both write what both of them found missing."""
        self._is_mine = False
        self._last: PointName | None = None
        """The last point that is there."""
        self._points = 0
        self.watchdog = Watchdog(order.patience_seconds, self._lose)

    def catch_up(self) -> bool:
        """Bring over what is new, and say how that went; whatever a tracker raises, it is opened anew the next time."""
        try:
            self.watchdog.begin()
            self._bring()
            self._report()
            return True
        except Exception as error:
            self._mirror, self._last = None, None
            self._lose(_spelt(error))
            return False
        finally:
            self.watchdog.rest()

    def close(self) -> None:
        """Have all of it arrive, with what the run ended with."""
        try:
            self.watchdog.begin()
            if self._mirror is not None:
                self._mirror.close(product_of(self._run))
            self._report(is_over=True)
        except Exception as error:
            self._lose(_spelt(error))

    def _bring(self) -> None:
        self._take_turn()
        if self._mirror is None:
            opened = cast(OpenMirror, implementation_of(self._order.tracker))
            self._mirror = opened(subject_of(self._run), self._order.tracker)
        for place in places_after(self._run, self._last):
            point = point_at(self._run, place, samples=self._order.tracker.samples)
            if self._mirror.lacks(point):
                self._mirror.write(point, None if point.samples is None else point.samples())
                self._points += 1
            self._last = place
            self.watchdog.begin()
            self._report()

    def _take_turn(self) -> None:
        if not self._is_mine:
            name = fingerprint_of(self._order.model_dump(mode="json", include={"tracker"}))
            self._is_mine = self._turn.enter_context(self._run.store.hold(f"{TRACKERS}{name}")) is not None
            if not self._is_mine:
                self._turn.close()
                raise BadInput("another process brings the run there, such as the one that trains it")

    def _report(self, *, is_over: bool = False) -> None:
        self._send(MirrorReport(tracker=self._order.tracker.known_as, is_over=is_over))

    def _lose(self, problem: str) -> None:
        self._send(MirrorReport(tracker=self._order.tracker.known_as, problem=problem))

    def _send(self, report: MirrorReport) -> None:
        step = None if self._last is None else self._last.step
        send(report.model_copy(update={"points": self._points, "step": step}), self._told)


def product_of(run: Run) -> Product | None:
    """What a run ended with: the policy that was evaluated behind its last iteration; none while it goes on."""
    places = [*places_after(run, None)]
    if not places or places[-1].series != "evaluation" or not places[-1].step:
        return None
    policy = policy_of(policy_after(run, places[-1].step))
    return Product(places[-1].step, policy.digest, f"{run.store.uri}/{(policy.adapter or policy.weights).key}")


def _spelt(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no reason given"
    return (text if isinstance(error, RheostatError) else f"{type(error).__name__}: {text}")[:SHOWN]


def main() -> None:
    """Mirror until stdin ends, and then once more."""
    told = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no report
    order = MirrorOrder.model_validate_json(sys.stdin.buffer.readline())
    mirroring = Mirroring(order, told)
    looks = Looks(mirroring.watchdog)
    while not looks.are_over:
        looks.wait(None if mirroring.catch_up() else RETRY_SECONDS)
    if mirroring.catch_up():
        mirroring.close()
    os._exit(0)  # libraries wait for their threads and servers at an exit, for which nobody has time


if __name__ == "__main__":
    main()
