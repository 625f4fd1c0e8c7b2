"""The learning curve as a PNG."""

import io
from collections.abc import Sequence

from tasks.reports import Accuracy


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
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    return buffer.getvalue()
