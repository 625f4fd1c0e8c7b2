"""Live display of a running run: a page that is updated on the terminal, below permanent lines.

A separate thread reads the page from the store, so training does not depend on it, and watching from another machine
shows the same.
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from flows.cli.options import Lines, Verbosity, attach, detach, log_progress
from infra.terminal import console, wrapped
from infra.untrusted_text import visible

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

    from tasks.views.metrics import IterationReport
    from tasks.views.standing import Standing, Watcher

LOOK_SECONDS: Final = 1.0
REMOTE_SECONDS: Final = 5.0
"""Interval in seconds between two reads of a remote store, where each read takes several requests."""
CHECKING: Final = "checking the configuration, the data and the policy"
STARTING: Final = "starting workers, and Prefect's server"
BAR: Final = 28
SPARKS: Final = "▁▂▃▄▅▆▇█"


@contextmanager
def shown(store: str, name: str, *, iterations: int, verbosity: Verbosity, as_json: bool) -> Iterator[None]:
    """Run the block and show the run that this process trains: live on a terminal, else as plain lines."""
    terminal = console()
    if as_json or verbosity != "normal" or not terminal.is_terminal or terminal.is_dumb_terminal:
        log_progress(quiet=as_json, verbosity=verbosity)
        yield
        return
    from tasks.views.standing import Watcher

    with _live(terminal) as live:
        page = _Page(live, Watcher(store, name, iterations))
        lines = _LinesAbove(live.console, page)
        attach(lines)
        page.start()
        try:
            yield
        finally:
            page.end()
            detach(lines)


@contextmanager
def _live(terminal: "Console") -> Iterator["Live"]:
    from rich.live import Live
    from rich.text import Text

    with Live(Text(CHECKING), console=terminal, auto_refresh=False, transient=True) as live:
        terminal.show_cursor()  # a killed process could not show it again
        yield live


class _LinesAbove(Lines):
    """Logging handler that prints above the live page. The page itself shows the remaining time."""

    def __init__(self, terminal: "Console", page: "_Page") -> None:
        super().__init__(lambda line, level: print_line(terminal, line, level))
        self._page = page

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record. The first record means that the run is starting."""
        self._page.what = STARTING
        super().emit(record)

    def suffix(self, record: logging.LogRecord) -> str:
        """Return an empty string, because the page shows the remaining time."""
        return ""


def print_line(terminal: "Console", line: str, level: int = logging.INFO) -> None:
    """Print a permanent line: warnings in yellow, errors in red."""
    from rich.text import Text

    terminal.print(
        Text(
            wrapped(visible(line)),
            style="yellow" if level == logging.WARNING else "red" if level > logging.WARNING else "",
        )
    )


class _Page(threading.Thread):
    """Thread that updates the page until the run has ended. Failed reads are retried."""

    def __init__(self, live: "Live", watcher: "Watcher") -> None:
        super().__init__(name="live page", daemon=True)
        self._live, self._watcher = live, watcher
        self._ended, self._began = threading.Event(), time.monotonic()
        self.what = CHECKING
        """Current activity before there is a run to read."""

    def run(self) -> None:
        """Read the run and update the page, repeatedly."""
        from rich.text import Text

        pause = REMOTE_SECONDS if self._watcher.store.startswith("s3://") else LOOK_SECONDS
        while not self._ended.wait(pause):
            seconds = time.monotonic() - self._began
            try:
                drawn = draw(self._watcher.look(), seconds=seconds)
            except Exception:  # no run yet, or an unreachable store: display errors must not end a run
                drawn = Text(f"{self.what}  {_clock(seconds)}", style="dim")
            if not self._ended.is_set():
                self._live.update(drawn, refresh=True)

    def end(self) -> None:
        """Stop updating the page."""
        self._ended.set()
        self.join(timeout=LOOK_SECONDS)


def draw(standing: "Standing", *, seconds: float) -> "RenderableType":
    """Return the page: progress, current activity, and additional metrics of the last iteration."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    doing, sealed, total = standing.doing, len(standing.reports), standing.iterations
    eta = "" if standing.eta_seconds is None else f"  eta {_clock(standing.eta_seconds)}"
    page = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=total, completed=sealed, width=BAR) if total else Text("")
    page.add_row(
        Text(standing.run, style="bold", overflow="ellipsis", no_wrap=True),
        bar,
        Text(f"{sealed}{f' of {total}' if total else ''} iterations  {_clock(seconds)}{eta}"),
    )
    counted = f"{doing.done:,} of {doing.of:,} {doing.unit}" if doing.of else ""
    steps = ProgressBar(total=doing.of, completed=doing.done, width=BAR) if doing.of else Text("")
    page.add_row(Text(visible(doing.what)), steps, Text(visible("  ".join(filter(None, (counted, doing.note))))))
    if standing.reports:
        page.add_row(
            Text("sampled accuracy"), Text(sparks([r.accuracy for r in standing.reports])), Text(_range(standing))
        )
        page.add_row(Text("last iteration"), *map(Text, _learnt(standing.reports[-1])))
    return page


def sparks(values: Sequence[float | None]) -> str:
    """Return the newest values as a row of bars, scaled between their minimum and maximum."""
    known = [value for value in values[-BAR:] if value is not None]
    low, span = min(known, default=0.0), (max(known, default=0.0) - min(known, default=0.0)) or 1.0
    return "".join(SPARKS[round((value - low) / span * (len(SPARKS) - 1))] for value in known)


def _range(standing: "Standing") -> str:
    best = max((each.mean for each in standing.evaluations), default=None)
    return "" if best is None else f"held out, {standing.evaluations[-1].chosen}: {best:.3f} at best"


def _learnt(report: "IterationReport") -> tuple[str, str]:
    from tasks.views.metrics import percent, shown

    return (
        f"entropy {shown(report.entropy, digits=2)}  gradient {shown(report.grad_norm, digits=2)}",
        f"cut off {percent(report.truncated)}  groups that differ {percent(report.informative)}",
    )


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def follow(store: str, run: str) -> None:
    """Show a run that another process trains until the run ends or no process trains it. Without a terminal, print
    lines."""
    from tasks.views.standing import Watcher

    watcher, terminal = Watcher(store, run), console()
    if terminal.is_terminal and not terminal.is_dumb_terminal:
        with _live(terminal) as live:
            last = _followed(watcher, terminal, live)
    else:
        last = _followed(watcher, terminal, None)
    sealed = len(last.reports)
    told = f"{sealed}{f' of {last.iterations}' if last.iterations else ''} iterations"
    again = "" if last.is_over else ", and no process trains it now: `rheostat train` with its configuration continues"
    print_line(terminal, f"run {run}: {told}{again}")


def _followed(watcher: "Watcher", terminal: "Console", live: "Live | None") -> "Standing":
    """Print new results and update the page at each read. Return after two reads without a process that trains the
    run."""
    pause = REMOTE_SECONDS if watcher.store.startswith("s3://") else LOOK_SECONDS
    iterations, evaluations, alone, began = 0, 0, 0, time.monotonic()
    while True:
        standing = watcher.look()
        for accuracy in standing.evaluations[evaluations:]:
            print_line(terminal, f"held-out accuracy after {accuracy.number} iterations: {accuracy.line()}")
        for report in standing.reports[iterations:]:
            print_line(terminal, report.line(standing.iterations or report.iteration))
            for warning in report.warnings.values():
                print_line(terminal, f"warning: iteration {report.iteration}: {warning}", logging.WARNING)
        iterations, evaluations = len(standing.reports), len(standing.evaluations)
        alone = alone + 1 if watcher.holder() is None else 0
        if standing.is_over or alone > 1:
            return standing
        if live is not None:
            live.update(draw(standing, seconds=time.monotonic() - began), refresh=True)
        time.sleep(pause)
