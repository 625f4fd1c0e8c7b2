"""Curves as PNG."""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

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
