"""Line charts of a report, drawn as SVG. The page's style sheet sets the colors, and its script shows the values under
the pointer.

Lines differ in their dashes as well as in color, so that they can be distinguished in grayscale.
"""

import io
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from rheostat.infra.config import Settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 400, 210
"""Width and height of a chart in points. The page scales the chart."""
DASHES: Final = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 3)))
HATCHES: Final = ("", "////", "----", "\\\\\\\\", "xxxx", "||||")
COLORS: Final = tuple(f"#fe00{place:02x}" for place in range(6))
"""Placeholder colors of series, which no other part of a chart uses. The page replaces each placeholder with a color of
its style sheet."""
INK: Final = "#fe00ff"
STYLE: Final = str(files("rheostat.tasks.views.report") / "curves.mplstyle")

_NUMBERED: Final = re.compile(r' id="[A-Za-z0-9.]+_\d+"')
"""Group ids that matplotlib repeats in every picture. They are removed because a page has several pictures."""


class Series(Settings):
    """One line of a chart: a number per iteration. Index 0 is the state before the first iteration. None marks a
    missing number."""

    name: str
    """Name of the series in legends and tables."""
    values: list[float | None]
    """Numbers by iteration."""
    low: list[float | None] = []
    """Lower ends of the intervals around the numbers. If set, the numbers are drawn as points with error bars."""
    high: list[float | None] = []
    """Upper ends of the intervals around the numbers."""

    @property
    def is_there(self) -> bool:
        """Whether the series has at least one number."""
        return any(value is not None for value in self.values)


class Chart(Settings):
    """Chart before it is drawn: title and lines."""

    title: str
    """Title of the chart."""
    series: list[Series]
    """Series in the order of the legend."""
    is_logarithmic: bool = False
    """Whether the vertical axis is logarithmic."""


class DrawnChart(Settings):
    """Chart as SVG, with what the page's script needs to find the iteration under the pointer."""

    title: str
    """Title of the chart."""
    svg: str
    """Chart as an SVG element."""
    left: float
    """Horizontal position of iteration `first`, as a fraction of the chart's width."""
    right: float
    """Horizontal position of iteration `last`, as a fraction of the chart's width."""
    first: int
    """Iteration at the left end of the axis."""
    last: int
    """Iteration at the right end of the axis."""
    series: list[Series]
    """Series that are drawn."""


def draw(chart: Chart) -> DrawnChart:
    """Draw a chart as SVG. Series without any number are left out."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    series = [each for each in chart.series if each.is_there]
    last = max((len(each.values) - 1 for each in series), default=1)
    with rc_context(fname=STYLE):
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), layout="constrained")
        axes = figure.subplots()
        for place, each in enumerate(series):
            _plot_series(axes, each, place)
        axes.set(xlim=(0, max(1, last)), xlabel="iteration")
        if chart.is_logarithmic and any((value or 0) > 0 for each in series for value in each.values):
            axes.set_yscale("log")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.15)
        if len(series) > 1:
            axes.legend(loc="best", frameon=False, ncols=1 + (len(series) > 3))
        svg, box = picture(figure, chart.title), axes.get_position()
    return DrawnChart(title=chart.title, svg=svg, left=box.x0, right=box.x1, first=0, last=max(1, last), series=series)


def _plot_series(axes: "Axes", series: Series, place: int) -> None:
    color, dashes = COLORS[place % len(COLORS)], DASHES[place % len(DASHES)]
    known = [(number, value) for number, value in enumerate(series.values) if value is not None]
    numbers, values = [number for number, _ in known], [value for _, value in known]
    if not series.low:
        axes.plot(
            numbers, values, color=color, linestyle=dashes, linewidth=max(1.2, 2.4 - 0.5 * place), label=series.name,
            marker="o" if len(known) == 1 else None,
        )  # fmt: skip
        return
    spans = [(value - (series.low[number] or 0), (series.high[number] or 0) - value) for number, value in known]
    axes.errorbar(
        numbers, values, yerr=list(zip(*spans, strict=True)), fmt="o", markersize=4, capsize=3, linewidth=1,
        color=color, label=series.name, clip_on=False, zorder=5,
    )  # fmt: skip


def picture(figure: "Figure", title: str) -> str:
    """Encode a matplotlib figure as an SVG element for a page. Colors become CSS variables that the page defines."""
    sink = io.StringIO()
    figure.patch.set_alpha(0)
    for axes in figure.axes:
        axes.patch.set_alpha(0)
    figure.savefig(sink, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = sink.getvalue()
    svg = svg[svg.index("<svg") :]
    for place, color in enumerate(COLORS):
        svg = svg.replace(color, f"var(--series-{place})")
    svg = _NUMBERED.sub("", svg)
    head = f'<svg role="img" aria-label="{escape(title)}"'
    return svg.replace(INK, "var(--ink)").replace("<svg", head, 1)


def columns_of(numbers: Iterable[int], values: Iterable[float | None], *, length: int) -> list[float | None]:
    """Return numbers as a list of `length` values that is indexed by iteration. Iterations without a number
    are None."""
    column: list[float | None] = [None] * length
    for number, value in zip(numbers, values, strict=True):
        column[number] = value
    return column


def largest(series: Sequence[Series]) -> int:
    """Return the number of values in the longest series. Index 0 is the state before the first iteration."""
    return max((len(each.values) for each in series), default=0)
