"""Live display of an active run. The terminal shows permanent log lines and below them a page that is updated
continuously.

A separate thread reads the data of the page from the store, so the display cannot delay training and also works on
another machine.
"""

import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from rheostat.flows.cli.options import LineHandler, Verbosity, attach_handler, detach_handler, log_progress
from rheostat.infra.counts import format_count
from rheostat.infra.store.storage import is_bucket_address
from rheostat.infra.terminal import console, wrap_text
from rheostat.infra.untrusted_text import make_visible
from rheostat.tasks.run.preflight import report_checks

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

    from rheostat.tasks.views.metrics import IterationReport
    from rheostat.tasks.views.run_progress import Activity, ProgressReader, RunProgress

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0
REMOTE_SECONDS: Final = 5.0
"""Interval in seconds between two reads of a remote store. It is longer than for a local store, because each read takes
several requests."""
SILENT_SECONDS: Final = 30.0
"""Time in seconds without output after which a line about the current activity is printed, if there is no terminal."""
CHECKING: Final = "checking the configuration, the data and the policy"
CHECKING_PART: Final = "checking the inputs: {}"
STARTING: Final = "starting workers and Prefect's server"
BAR: Final = 28
SPARKS: Final = "▁▂▃▄▅▆▇█"


@contextmanager
def show_run(store: str, name: str, *, iterations: int, verbosity: Verbosity, as_json: bool) -> Iterator[None]:
    """Run the block, which trains a run in this process, and show the run's progress. On a terminal this is a live
    page, otherwise plain lines are printed."""
    terminal = console()
    if as_json or verbosity != "normal" or not terminal.is_terminal or terminal.is_dumb_terminal:
        log_progress(quiet=as_json, verbosity=verbosity)
        with _report_long_work(store, name, iterations) if verbosity != "quiet" and not as_json else nullcontext():
            yield
        return
    from rheostat.tasks.views.run_progress import ProgressReader

    with _open_live(terminal) as live:
        page = _Page(live, ProgressReader(store, name, iterations))
        lines = _LinesAbove(live.console, page)
        attach_handler(lines)
        page.start()
        try:
            with report_checks(page.show_check):
                yield
        finally:
            page.end()
            detach_handler(lines)


@contextmanager
def show_checks(*, as_json: bool) -> Iterator[None]:
    """Run the block, which checks a configuration. On a terminal, one line on stderr names the part that is being
    checked, and disappears at the end."""
    terminal = console(sys.stderr)
    if as_json or not terminal.is_terminal or terminal.is_dumb_terminal:
        yield
        return
    with (
        terminal.status(CHECKING) as line,
        report_checks(lambda part: line.update(make_visible(CHECKING_PART.format(part)))),
    ):
        yield


@contextmanager
def _report_long_work(store: str, name: str, iterations: int) -> Iterator[None]:
    """Run the block, and log one line about the current activity of the run whenever nothing else was logged for
    `SILENT_SECONDS`."""
    from rheostat.tasks.views.run_progress import ProgressReader

    reporter = _LongWork(ProgressReader(store, name, iterations))
    attach_handler(reporter.last_line)
    reporter.start()
    try:
        yield
    finally:
        reporter.end()
        detach_handler(reporter.last_line)


class _LastLine(logging.Handler):
    """Logging handler that remembers when the latest line was printed."""

    def __init__(self) -> None:
        super().__init__()
        self.moment = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        """Remember the current time, unless the record comes from a worker, whose records are not printed."""
        if not record.name.startswith("rheostat.models."):
            self.moment = time.monotonic()


class _LongWork(threading.Thread):
    """Thread that logs the progress of long work, such as a warm-up, if the output is no terminal."""

    def __init__(self, reader: "ProgressReader") -> None:
        super().__init__(name="progress lines", daemon=True)
        self._reader, self._ended = reader, threading.Event()
        self.last_line = _LastLine()

    def run(self) -> None:
        """Log the current activity after each silence. A failed read of the store is ignored."""
        while not self._ended.wait(LOOK_SECONDS):
            if time.monotonic() - self.last_line.moment < SILENT_SECONDS:
                continue
            try:
                line = describe_activity(self._reader.read_progress().activity)
            except Exception:  # such as no run yet, or an unreachable store, which must not end a run
                line = ""
            self.last_line.moment = time.monotonic()
            if line:
                logger.info("%s", line)

    def end(self) -> None:
        """Stop the thread, and wait briefly for its end."""
        self._ended.set()
        self.join(timeout=LOOK_SECONDS)


def describe_activity(activity: "Activity") -> str:
    """Return one line about the current activity of a run, such as "warm-up: 300 of 1,200 steps  loss 0.412"."""
    details = _describe_details(activity)
    return make_visible(f"{activity.description}: {details}" if details else activity.description)


def _describe_details(activity: "Activity") -> str:
    progress = f"{activity.done:,} of {activity.total:,} {activity.unit}" if activity.total else ""
    return "  ".join(filter(None, (progress, activity.note)))


@contextmanager
def _open_live(terminal: "Console") -> Iterator["Live"]:
    from rich.live import Live
    from rich.text import Text

    with Live(Text(CHECKING), console=terminal, auto_refresh=False, transient=True) as live:
        terminal.show_cursor()  # a killed process could not show it again
        yield live


class _LinesAbove(LineHandler):
    """Logging handler that prints log records as lines above the live page of a run. It omits the remaining time,
    because the page shows it."""

    def __init__(self, terminal: "Console", page: "_Page") -> None:
        super().__init__(lambda line, level: print_line(terminal, line, level))
        self._page = page

    def emit(self, record: logging.LogRecord) -> None:
        """Print one log record. Any record means that the input checks are over, so the page changes its placeholder
        text from "checking" to "starting"."""
        self._page.what = STARTING
        super().emit(record)

    def suffix(self, record: logging.LogRecord) -> str:
        """Return an empty string instead of the remaining time, because the live page shows the remaining time."""
        return ""


def print_line(terminal: "Console", line: str, level: int = logging.INFO) -> None:
    """Print a line that stays on the terminal, above the live page if there is one. Warnings are yellow, and errors are
    red."""
    from rich.text import Text

    terminal.print(
        Text(
            wrap_text(make_visible(line)),
            style="yellow" if level == logging.WARNING else "red" if level > logging.WARNING else "",
        )
    )


class _Page(threading.Thread):
    """Thread that updates the live page of a run until the run has ended. A failed read of the run's progress is
    ignored, and the next update reads the progress again."""

    def __init__(self, live: "Live", watcher: "ProgressReader") -> None:
        super().__init__(name="live page", daemon=True)
        self._live, self._watcher = live, watcher
        self._ended, self._began = threading.Event(), time.monotonic()
        self.what = CHECKING
        """Text to show before there is a run to read."""

    def show_check(self, part: str) -> None:
        """Show the name of the part of the configuration that is being checked."""
        self.what = make_visible(CHECKING_PART.format(part))

    def run(self) -> None:
        """Read the progress of the run at regular intervals, and redraw the page after each read."""
        from rich.text import Text

        pause = REMOTE_SECONDS if is_bucket_address(self._watcher.store) else LOOK_SECONDS
        while not self._ended.wait(pause):
            seconds = time.monotonic() - self._began
            try:
                page = draw_page(self._watcher.read_progress(), seconds=seconds)
            except Exception:  # no run yet, or an unreachable store: display errors must not end a run
                page = Text(f"{self.what}  {_format_duration(seconds)}", style="dim")
            if not self._ended.is_set():
                self._live.update(page, refresh=True)

    def end(self) -> None:
        """Stop updating the page, and wait briefly for the thread to end."""
        self._ended.set()
        self.join(timeout=LOOK_SECONDS)


def draw_page(status: "RunProgress", *, seconds: float) -> "RenderableType":
    """Draw the live page of a run: progress, current activity, and some metrics of the last iteration. `seconds` is the
    time since the display started."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    activity, sealed, total = status.activity, len(status.reports), status.iterations
    eta = "" if status.eta_seconds is None else f"  eta {_format_duration(status.eta_seconds)}"
    page = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=total, completed=sealed, width=BAR) if total else Text("")
    page.add_row(
        Text(status.run, style="bold", overflow="ellipsis", no_wrap=True),
        bar,
        Text(f"{sealed}{f' of {total}' if total else ''} iterations  {_format_duration(seconds)}{eta}"),
    )
    steps = ProgressBar(total=activity.total, completed=activity.done, width=BAR) if activity.total else Text("")
    page.add_row(
        Text(make_visible(activity.description)),
        steps,
        Text(make_visible(_describe_details(activity))),
    )
    if status.reports:
        page.add_row(
            Text("sampled accuracy"),
            Text(draw_sparkline([r.accuracy for r in status.reports])),
            Text(_describe_best(status)),
        )
        page.add_row(Text("last iteration"), *map(Text, _describe_last(status.reports[-1])))
    return page


def draw_sparkline(values: Sequence[float | None]) -> str:
    """Draw the newest values as one line of text with bars, whose heights are scaled between the minimum and maximum.
    None is skipped."""
    known = [value for value in values[-BAR:] if value is not None]
    low, span = min(known, default=0.0), (max(known, default=0.0) - min(known, default=0.0)) or 1.0
    return "".join(SPARKS[round((value - low) / span * (len(SPARKS) - 1))] for value in known)


def _describe_best(status: "RunProgress") -> str:
    best = max((each.mean for each in status.evaluations), default=None)
    return "" if best is None else f"best held-out accuracy ({status.evaluations[-1].sampling_method}) {best:.3f}"


def _describe_last(report: "IterationReport") -> tuple[str, str]:
    from rheostat.tasks.views.metrics import format_number, format_percent

    return (
        f"entropy {format_number(report.entropy, digits=2)}  gradient norm {format_number(report.grad_norm, digits=2)}",
        f"cut off {format_percent(report.truncated)}  informative groups {format_percent(report.informative)}",
    )


def _format_duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def watch_run(store: str, run: str) -> None:
    """Show the progress of a run that another process trains, until the run is finished or no process trains it any
    more. On a terminal this is a live page, otherwise plain lines are printed."""
    from rheostat.tasks.views.run_progress import ProgressReader

    watcher, terminal = ProgressReader(store, run), console()
    if terminal.is_terminal and not terminal.is_dumb_terminal:
        with _open_live(terminal) as live:
            status = _follow_until_end(watcher, terminal, live)
    else:
        status = _follow_until_end(watcher, terminal, None)
    sealed = len(status.reports)
    progress = f"{sealed}{f' of {status.iterations}' if status.iterations else ''} iterations"
    hint = (
        ""
        if status.is_finished
        else ". No process trains this run now; `rheostat train` with its configuration continues it"
    )
    print_line(terminal, f"run {run}: {progress}{hint}")


def _follow_until_end(watcher: "ProgressReader", terminal: "Console", live: "Live | None") -> "RunProgress":
    """Print new results of a run, and update the live page after each read of the store. Return the last progress when
    the run is finished, or when two reads in a row find no process that trains the run."""
    pause = REMOTE_SECONDS if is_bucket_address(watcher.store) else LOOK_SECONDS
    iterations, evaluations, absences, began = 0, 0, 0, time.monotonic()
    while True:
        status = watcher.read_progress()
        for accuracy in status.evaluations[evaluations:]:
            print_line(
                terminal, f"held-out accuracy after {format_count(accuracy.number, 'iteration')}: {accuracy.line()}"
            )
        for report in status.reports[iterations:]:
            print_line(terminal, report.line(status.iterations or report.iteration))
            for warning in report.warnings.values():
                print_line(terminal, f"warning: iteration {report.iteration}: {warning}", logging.WARNING)
        iterations, evaluations = len(status.reports), len(status.evaluations)
        absences = absences + 1 if watcher.find_lock_holder() is None else 0
        if status.is_finished or absences > 1:
            return status
        if live is not None:
            live.update(draw_page(status, seconds=time.monotonic() - began), refresh=True)
        time.sleep(pause)
