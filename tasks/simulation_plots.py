"""The simulated policies side by side as a PNG."""

import io
from collections.abc import Mapping, Sequence

from placement.simulator.report import Ratio


def policy_bars(groups: Sequence[str], bars: Mapping[str, Sequence[Ratio]], *, title: str) -> bytes:
    """Draw one group of bars per cell, one bar per policy: time over the lower bound, with 95% intervals."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # 0.5 s to import; only --plot needs it

    figure = Figure(figsize=(max(7.0, 1.4 * len(groups) + 2), 4.2), layout="constrained")
    axes = figure.subplots()
    width = 0.85 / len(bars)
    for number, (policy, ratios) in enumerate(bars.items()):
        at = [group + (number - (len(bars) - 1) / 2) * width for group in range(len(groups))]
        # One seed has no interval to draw.
        spans = [ratio.high - ratio.mean if ratio.seeds > 1 else 0.0 for ratio in ratios]
        color = "black" if policy == "adaptive" else colormaps["tab10"](number % 10)
        axes.bar(at, [ratio.mean for ratio in ratios], width, yerr=spans, label=policy, color=color, ecolor="gray")
    axes.axhline(1.0, color="gray", linewidth=1)
    axes.set(title=title, ylabel="time over the lower bound", ylim=(0.9, None))
    axes.set_xticks(range(len(groups)), groups)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(ncols=3, fontsize="small")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=90, metadata={"Software": None})
    return buffer.getvalue()
