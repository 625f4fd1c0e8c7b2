"""Tables and plots of the rewards that a soup's policies reach for different preferences (the front)."""

from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from itertools import combinations, product
from typing import TYPE_CHECKING, Final, Literal

from rheostat.tasks.soup.record import SoupPoint, SoupRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METHODS: Final = {
    "bone": "Bone Soup",
    "direct": "backbones weighted by μ",
    "rewarded": "Rewarded Soup",
    "oracle": "one run per preference",
}
MARKERS: Final = {"bone": "o", "direct": "D", "rewarded": "s", "oracle": "^"}


def front_rows(record: SoupRecord) -> Iterator[dict[str, str]]:
    """Yield a table row for each evaluated preference: merge weights, and rewards in standard deviations above the
    start policy."""
    for point in record.points:
        yield {
            "preference": _format_numbers(point.preference),
            "weights": _format_numbers(point.weights) if point.weights else "trained",
            **{term: f"{reward:+.3f}" for term, reward in zip(record.terms, point.standardised, strict=True)},
            "μ·R": f"{point.value:+.3f}",
        }


def metric_row(record: SoupRecord) -> Mapping[str, str]:
    """Return a table row with metrics of how good the policies of a soup are over all preferences, such as the
    hypervolume."""
    metrics = record.metrics
    return {
        "method": METHODS[record.method] + (f", β {record.beta:g}" if record.method in ("bone", "direct") else ""),
        "hypervolume": f"{metrics.hypervolume:.3f}",
        "mean μ·R": f"{metrics.mean:.3f}",
        "inside": "–" if metrics.inside is None else f"{metrics.inside:.3f}",
        **{f"corner {term}": f"{corner:.3f}" for term, corner in zip(record.terms, metrics.corners, strict=True)},
        "τ": "–" if metrics.kendall_tau is None else f"{metrics.kendall_tau:.2f}",
        "non-dominated": f"{metrics.non_dominated} of {len(record.points)}",
        "sparsity": f"{metrics.sparsity:.3f}",
        "spacing": f"{metrics.spacing:.3f}",
    }


def draw_fronts(records: Sequence[SoupRecord], *, encoding: Literal["png", "svg"]) -> bytes:
    """Plot the rewards of all evaluated policies, as PNG or SVG. There is one column per soup and one row per pair of
    rewards."""
    from matplotlib.figure import Figure

    terms, names = records[0].terms, list(dict.fromkeys(record.name for record in records))
    pairs = list(combinations(range(len(terms)), 2))
    figure = Figure(figsize=(5.5 * len(names), 4.5 * len(pairs)), layout="constrained")
    panels = figure.subplots(len(pairs), len(names), squeeze=False)
    for axes, ((across, up), name) in zip(panels.flat, product(pairs, names), strict=True):
        for record in records:
            if record.name == name:
                _draw_soup(axes, record, across=across, up=up)
        axes.set(xlabel=f"{terms[across]}, standard deviations", ylabel=f"{terms[up]}, standard deviations")
        axes.set_title(name if len(names) > 1 else "")
        axes.grid(alpha=0.3)
        axes.legend(loc="best")
    content = BytesIO()
    figure.savefig(content, format=encoding, metadata={"Date": None} if encoding == "svg" else None)
    return content.getvalue()


def _draw_soup(axes: "Axes", record: SoupRecord, *, across: int, up: int) -> None:
    """Add the policies of one soup to a plot. With two rewards a line connects them. With three rewards the line would
    cross itself, so only points are drawn."""
    rows = [point.standardised for point in record.points]
    line = "-" if len(record.terms) == 2 else ""
    x, y = [row[across] for row in rows], [row[up] for row in rows]
    axes.plot(x, y, linestyle=line, marker=MARKERS[record.method], label=METHODS[record.method])
    for point in record.points:
        if _is_corner(point):
            spot = (point.standardised[across], point.standardised[up])
            axes.annotate(
                _format_numbers(point.preference), spot, fontsize=7, xytext=(4, 4), textcoords="offset points"
            )


def _is_corner(point: SoupPoint) -> bool:
    return max(point.preference) == 1


def _format_numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)
