"""Curves as SVG that a page can colour, and what its script needs to read values off them.

Lines differ by dashes as well as by colour, so that they are told apart in grey.
"""

import io
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from infra.config import Settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 400, 210
"""Of a chart, in points; a page scales it."""
DASHES: Final = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 3)))
HATCHES: Final = ("", "////", "----", "\\\\\\\\", "xxxx", "||||")
COLORS: Final = tuple(f"#fe00{place:02x}" for place in range(6))
"""Of series, which a page gives by its style sheet: nothing else in a chart has these."""
INK: Final = "#fe00ff"
STYLE: Final = str(files("tasks.views.report") / "curves.mplstyle")

_NUMBERED: Final = re.compile(r' id="[A-Za-z0-9.]+_\d+"')
"""Names that matplotlib gives groups of every picture, of which a page has several."""


class Series(Settings):
    """Numbers by iteration, from 0, which is before the first; none where there is none."""

    name: str
    """What it is, as legend and tables call it."""
    values: list[float | None]
    """The numbers themselves."""
    low: list[float | None] = []
    """Lower ends of intervals around them; such numbers are points."""
    high: list[float | None] = []
    """Upper ends."""

    @property
    def is_there(self) -> bool:
        """Whether it has a number."""
        return any(value is not None for value in self.values)


class Chart(Settings):
    """Series over each other."""

    title: str
    """What it shows."""
    series: list[Series]
    """In order of the legend."""
    is_logarithmic: bool = False
    """Whether magnitudes are what counts."""


class DrawnChart(Settings):
    """A chart, and where in it which iteration lies."""

    title: str
    """What it shows."""
    svg: str
    """The picture."""
    left: float
    """Where iteration `first` lies, as a share of the width."""
    right: float
    """Where iteration `last` lies."""
    first: int
    """An iteration."""
    last: int
    """Another one."""
    series: list[Series]
    """What it shows."""


def draw(chart: Chart) -> DrawnChart:
    """Draw a chart's series; those without a number are left out."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    series = [each for each in chart.series if each.is_there]
    last = max((len(each.values) - 1 for each in series), default=1)
    with rc_context(fname=STYLE):
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), layout="constrained")
        axes = figure.subplots()
        for place, each in enumerate(series):
            _plot(axes, each, place)
        axes.set(xlim=(0, max(1, last)), xlabel="iteration")
        if chart.is_logarithmic and any((value or 0) > 0 for each in series for value in each.values):
            axes.set_yscale("log")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.15)
        if len(series) > 1:
            axes.legend(loc="best", frameon=False, ncols=1 + (len(series) > 3))
        svg, box = picture(figure, chart.title), axes.get_position()
    return DrawnChart(title=chart.title, svg=svg, left=box.x0, right=box.x1, first=0, last=max(1, last), series=series)


def _plot(axes: "Axes", series: Series, place: int) -> None:
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
    """Spell a figure as an SVG element whose colours the page gives."""
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
    """Lay numbers out by iteration."""
    found: list[float | None] = [None] * length
    for number, value in zip(numbers, values, strict=True):
        found[number] = value
    return found


def largest(series: Sequence[Series]) -> int:
    """Count the iterations of the longest series, the one before the first among them."""
    return max((len(each.values) for each in series), default=0)
