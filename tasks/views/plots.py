"""Plots of a run's learning curves and losses, as PNG or SVG."""

import asyncio
import io
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from rheostat.infra.config import read_recorded
from rheostat.infra.processes.watch import kill_and_wait
from rheostat.infra.store.runs import Run, open_run
from rheostat.models.config.rewards import ScoringConfig
from rheostat.tasks.views.metrics import Accuracy, IterationReport, evaluations_of, reports_of
from rheostat.tasks.views.runs import detect_deletion

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Format = Literal["png", "svg"]

DRAW_SECONDS: Final = 300.0
"""Maximum time in seconds for drawing the plot of an active run on a machine with busy processors."""


@dataclass(frozen=True, slots=True)
class Curves:
    """Data for plotting the learning curves of one run."""

    run: str
    reports: Sequence[IterationReport]
    evaluations: Sequence[Accuracy]


def curves_of(run: Run, *, others: Collection[str] = ()) -> Curves:
    """Read the statistics of a run's iterations and evaluations, for `learning_curves`. `others` are the names of the
    runs in the same plot. If the run was forked from one of them, its curves begin where the fork begins."""
    term = read_recorded(ScoringConfig, run.record.config["scoring"]).terms[0]
    first = first_own_point(run, others)
    with detect_deletion(run):
        reports = [each for each in reports_of(run, term=term) if each.iteration >= first]
        return Curves(run.name, reports, [each for each in evaluations_of(run) if each.number >= first])


def first_own_point(run: Run, others: Collection[str]) -> int:
    """Return the iteration at which the curves of a run begin in a plot with other runs: the last shared iteration if
    the run was forked from one of them, otherwise 0."""
    return run.fork.iteration if run.fork is not None and run.fork.parent in others else 0


async def draw_in_process(run: Run, key: str) -> bytes:
    """Plot the learning curves of a run in a separate low-priority process, store the PNG under `key`, and return it.

    Raises OSError if the process fails and TimeoutError if it takes longer than `DRAW_SECONDS`.
    """
    home, _, name = run.store.uri.rstrip("/").rpartition("/")
    command = [sys.executable, "-P", "-m", "rheostat.tasks.views.plots", home, name]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        async with asyncio.timeout(DRAW_SECONDS):
            picture, errors = await process.communicate()
    finally:
        await kill_and_wait(process)
    if process.returncode:
        raise OSError(f"the plot could not be drawn: {errors.decode(errors='replace').strip().rpartition(chr(10))[2]}")
    run.store.put(key, picture)
    return picture


async def draw_in_thread(run: Run, key: str) -> bytes:
    """Plot the learning curves of a run in a thread of this process, store the PNG under `key`, and return it.

    The thread stores the PNG even if the caller is canceled while it waits.
    """

    def draw() -> bytes:
        picture = learning_curves([curves_of(run)])
        run.store.put(key, picture)
        return picture

    return await asyncio.to_thread(draw)


def loss_curves(title: str, losses: Mapping[str, Sequence[float]]) -> bytes:
    """Plot the losses of several models as PNG. The horizontal axis is the progress of training in percent."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, course in losses.items():
        axes.plot([100 * place / max(1, len(course) - 1) for place in range(len(course))], course, label=name)
    axes.set(title=title, xlabel="steps, %", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    return _encode_figure(figure, "png")


def _reward_values(report: IterationReport) -> dict[str, float | None]:
    return {"total": report.reward, **(report.terms if len(report.terms) > 1 else {})}


PANELS: Final[Mapping[str, Callable[[IterationReport], dict[str, float | None]]]] = {
    "mean reward": _reward_values,
    "mean length, tokens": lambda report: {"": report.length},
    "share cut off": lambda report: {"": report.truncated},
    "share of informative groups": lambda report: {"": report.informative},
    "entropy, nats": lambda report: {"": report.entropy},
    "KL of the update, nats per token": lambda report: {"": report.kl},
    "gradient norm": lambda report: {"": report.grad_norm},
    "share of ratios clipped": lambda report: {"low": report.clip_low, "high": report.clip_high},
}
"""Small panels of the plot, by title. Each function returns the values of a panel for one iteration, by line label."""
COLUMNS: Final = 4
STYLES: Final = ("-", "--", ":", "-.")


def learning_curves(runs: Sequence[Curves], *, encoding: Format = "png") -> bytes:
    """Plot the learning curves of one or several runs and return the encoded image.

    The large panel shows sampled accuracy, and held-out accuracy with 95% intervals. The small panels below show the
    statistics in `PANELS`. Each run has its own color.
    """
    from matplotlib.figure import Figure  # importing takes 0.5 s, so only drawing imports it
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(13, 9))
    # Constrained layout would draw all axes several times and take twice as long.
    figure.subplots_adjust(left=0.05, right=0.99, top=0.96, bottom=0.04, hspace=0.4, wspace=0.2)
    grid = figure.add_gridspec(2 + -(-len(PANELS) // COLUMNS), COLUMNS)
    large = figure.add_subplot(grid[:2, :])
    for number, curves in enumerate(runs):
        _draw_accuracy(large, curves, colour=f"C{number}", name=f"{curves.run}: " if len(runs) > 1 else "")
    large.set(title=", ".join(curves.run for curves in runs), xlabel="iteration", ylabel="accuracy")
    large.legend(loc="best")
    large.xaxis.set_major_locator(MaxNLocator(integer=True))
    large.grid(alpha=0.3)
    for place, title in enumerate(PANELS):
        axes = figure.add_subplot(grid[2 + place // COLUMNS, place % COLUMNS], sharex=large)
        for number, curves in enumerate(runs):
            _draw_panel(axes, title, curves.reports, colour=f"C{number}")
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
    return _encode_figure(figure, encoding)


def _draw_accuracy(axes: "Axes", curves: Curves, *, colour: str, name: str) -> None:
    numbers = [report.iteration for report in curves.reports]
    axes.plot(
        numbers, _replace_missing([report.accuracy for report in curves.reports]), color=colour, label=f"{name}sampled"
    )
    evaluations = curves.evaluations
    axes.errorbar(
        [each.number for each in evaluations],
        [each.mean for each in evaluations],
        yerr=[[each.mean - each.low for each in evaluations], [each.high - each.mean for each in evaluations]],
        fmt="o",
        capsize=4,
        color=colour,
        markerfacecolor="white",
        label=f"{name}held out{f', {evaluations[0].sampling_method}' if evaluations else ''}, 95% interval",
    )


def _draw_panel(axes: "Axes", title: str, reports: Sequence[IterationReport], *, colour: str) -> None:
    rows = [PANELS[title](report) for report in reports]
    labels = list(dict.fromkeys(label for row in rows for label in row))
    for place, label in enumerate(labels):
        values = _replace_missing([row.get(label) for row in rows])
        numbers = [report.iteration for report in reports]
        axes.plot(numbers, values, STYLES[place % len(STYLES)], color=colour, linewidth=1, label=label)
    if len(labels) > 1 and not axes.get_legend():
        axes.legend(loc="best", fontsize=7)


def _replace_missing(values: Sequence[float | None]) -> list[float]:
    """Replace missing values by NaN, which leaves a gap in the line."""
    return [float("nan") if value is None else value for value in values]


def _encode_figure(figure: "Figure", encoding: Format) -> bytes:
    buffer = io.BytesIO()
    metadata = {"Software": None} if encoding == "png" else {"Creator": None, "Date": None}
    figure.savefig(buffer, format=encoding, dpi=110, metadata=metadata)
    return buffer.getvalue()


def main(store: str, name: str) -> None:
    """Write the learning curves of a run to stdout as PNG, with the lowest processor priority."""
    os.nice(19)
    sys.stdout.buffer.write(learning_curves([curves_of(open_run(store, name))]))


if __name__ == "__main__":
    main(*sys.argv[1:])
