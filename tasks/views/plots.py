"""Curves and simulated policies as PNG."""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from placement.simulator.report import Ratio
from tasks.views.metrics import Accuracy

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def loss_curves(title: str, losses: Mapping[str, Sequence[float]]) -> bytes:
    """Draw the course of each model's loss, from the first step to the last."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, course in losses.items():
        axes.plot([100 * place / max(1, len(course) - 1) for place in range(len(course))], course, label=name)
    axes.set(title=title, xlabel="steps, %", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    return _png(figure)


def learning_curve(
    title: str, iterations: Sequence[tuple[int, float, float]], evaluations: Sequence[Accuracy]
) -> bytes:
    """Draw training accuracy and reward by iteration, and held-out accuracy with its 95% intervals.

    `iterations` are (number, accuracy, reward).
    """
    from matplotlib.figure import Figure  # 0.5 s to import; only the end of a run needs it
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    numbers = [number for number, _, _ in iterations]
    accuracies = [accuracy for _, accuracy, _ in iterations]
    rewards = [reward for _, _, reward in iterations]
    axes.plot(numbers, accuracies, color="tab:blue", label="accuracy of rollouts")
    if rewards != accuracies:
        axes.plot(numbers, rewards, color="tab:gray", linewidth=1, label="mean reward of rollouts")
    means = [evaluation.mean for evaluation in evaluations]
    spans = [[e.mean - e.low for e in evaluations], [e.high - e.mean for e in evaluations]]
    axes.errorbar(
        [e.number for e in evaluations],
        means,
        yerr=spans,
        fmt="o",
        capsize=4,
        color="tab:orange",
        label="held-out accuracy, 95% interval",
    )
    axes.set(title=f"Run {title}", xlabel="iteration", ylabel="accuracy", ylim=(min(0.0, *rewards, 0.0), None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    return _png(figure)


def _png(figure: "Figure") -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    return buffer.getvalue()


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
