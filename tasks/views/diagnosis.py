"""Warnings about an iteration. Each warning describes a symptom in the metrics and suggests a fix, in one line."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

WAITED: Final = "environment_share"
"""Metric name: fraction of the generation time in which rollout workers were idle because they waited for
environments."""
INFORMATIVE: Final = "informative_share"
"""Metric name: fraction of the groups whose completions have different rewards. Only such groups train the policy."""
ENTROPY_LEFT: Final = "entropy_left"
"""Metric name: entropy divided by the entropy in the first iteration. Not measured if accuracy is above `RIGHT`."""
LONGER: Final = "length_growth"
"""Metric name: mean completion length divided by the mean length in the first iteration. Measured only if the reward
has not risen."""
RIGHT: Final = 0.9
"""Accuracy above which low entropy and uninformative groups are no problem, because the policy solves most problems."""
MEMORIZED: Final = "memorized"
"""Name of the warning that held-out accuracy is far below the accuracy on training prompts."""
GAIN: Final = 0.1
"""Minimum rise of the mean reward that counts as a rise, in standard deviations of the first iteration's rewards."""


@dataclass(frozen=True, slots=True)
class Symptom:
    """Condition on one metric, with the warning that users see if it holds."""

    metric: str
    bound: float
    warning: str
    """Text of the warning, with a placeholder such as {:.0%} for the value of the metric."""
    side: Literal["above", "below"] = "above"
    """Side of the bound on which a value triggers the warning."""

    def is_triggered(self, value: float) -> bool:
        """Return whether a value is beyond the bound."""
        return value > self.bound if self.side == "above" else value < self.bound


SYMPTOMS: Final = (
    Symptom(
        "credit/ended_failed_fraction",
        0.0,
        "Environments failed in {:.1%} of the episodes, which have no score. See the errors with `rheostat rollouts`.",
    ),
    Symptom(
        "credit/call_error_fraction",
        0.25,
        "{:.0%} of the tool calls cannot be parsed. Set rollout.environment.parser to the template's format of calls.",
    ),
    Symptom(
        "credit/ended_turns_fraction",
        0.5,
        "{:.0%} of the episodes reached rollout.environment.max_turns and were scored unfinished. Raise it if they "
        "need more turns.",
    ),
    Symptom(
        WAITED,
        0.5,
        "Rollout workers were idle for {:.0%} of the time, waiting for environments. Use more episodes per shard "
        "(rollout.shard_prompts). If environments reply to turns, you can also set rollout.environment.batches = 2.",
    ),
    Symptom(
        "credit/truncated_fraction",
        0.5,
        "{:.0%} of the completions were cut off at rollout.sampling.max_new_tokens. Raise this limit, or raise "
        "warmup.steps, so that the policy first learns from the answers in the data when to end.",
    ),
    Symptom(
        INFORMATIVE,
        0.05,
        "Only {:.0%} of the groups are informative (have different rewards) and train the policy. Use problems that "
        "are solved sometimes, raise rollout.group_size, or set rollout.dynamic to sample more prompts.",
        side="below",
    ),
    Symptom(
        ENTROPY_LEFT,
        0.1,
        "Entropy fell to {:.0%} of its value in iteration 1, so the policy explores little. Lower "
        "update.learning_rate, or raise update.loss.clip_high.",
        side="below",
    ),
    Symptom(
        LONGER,
        2.0,
        "Completions grew {:.1f}x since iteration 1 without a higher reward (length hacking?). Penalize length "
        "(algorithm.overlong), or lower update.learning_rate.",
    ),
    Symptom(
        "update/kl_old",
        1.0,
        "The update moved the policy {:.2g} nats per token away from the policy that generated the completions. Lower "
        "update.learning_rate.",
    ),
    Symptom(
        "update/kl",
        1.0,
        "The policy is {:.2g} nats per token away from the reference. Raise update.kl.coefficient, or lower "
        "update.learning_rate.",
    ),
    Symptom(
        "credit/kl",
        1.0,
        "The policy is {:.2g} nats per token away from the reference. Raise algorithm.kl.coefficient, or lower "
        "update.learning_rate.",
    ),
    Symptom(
        "update/mismatch_difference_mean",
        0.1,
        "Engine and trainer differ by {:.2g} nats per token for the same weights. Compare their precisions "
        "(rollout.engine.dtype, update.dtype).",
    ),
)
"""All symptoms, the most urgent first. In a healthy run KL and mismatch are thousandths of a nat."""

_TERM: Final = re.compile(r"credit/term_(.+)_std")


def find_warnings(
    metrics: Mapping[str, float], *, first: Mapping[str, float] | None = None, accuracy: float | None = None
) -> dict[str, str]:
    """Return one sentence for each metric of an iteration whose value is suspicious, by name of the metric.

    `first` contains the metrics of the run's first iteration and `accuracy` the fraction of correct completions.
    Warnings about changes since the first iteration need `first`.
    """
    flat = _flat_terms(metrics)
    values = (
        dict(metrics)
        | _informative_share(metrics, accuracy=accuracy)
        | _compare_with_first(metrics, first or {}, accuracy=accuracy)
    )
    if flat:  # a constant reward explains why groups do not differ
        values.pop(INFORMATIVE, None)
    measured_symptoms = [(each, values[each.metric]) for each in SYMPTOMS if each.metric in values]
    return {
        each.metric: each.warning.format(value) for each, value in measured_symptoms if each.is_triggered(value)
    } | flat


def _flat_terms(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return a warning for each reward term that has the same value for all completions, by name of the metric."""
    terms = {name: match[1] for name in metrics if (match := _TERM.fullmatch(name))}
    return {
        name: (
            f"Reward {term!r} gave every completion {metrics[f'credit/term_{term}_mean']:.3g}, so nothing can be "
            "trained from it. Read some completions with `rheostat rollouts`, then change or remove the reward."
        )
        for name, term in terms.items()
        if metrics[name] == 0 and metrics.get("credit/completions", 0) > 1
    }


def _informative_share(metrics: Mapping[str, float], *, accuracy: float | None) -> dict[str, float]:
    groups, informative = metrics.get("credit/groups", 0), metrics.get("credit/informative_groups", 0)
    return {INFORMATIVE: informative / groups} if groups and (accuracy is None or accuracy < RIGHT) else {}


def _compare_with_first(
    metrics: Mapping[str, float], first: Mapping[str, float], *, accuracy: float | None
) -> dict[str, float]:
    """Return the metrics that measure changes since the first iteration: entropy and completion length."""
    changes: dict[str, float] = {}
    entropy, length, reward = "update/entropy", "credit/length_mean", "credit/reward_mean"
    if metrics.keys() & first.keys() >= {entropy} and first[entropy] > 0 and (accuracy is None or accuracy < RIGHT):
        changes[ENTROPY_LEFT] = metrics[entropy] / first[entropy]
    if metrics.keys() & first.keys() >= {length, reward} and first[length] > 0:
        risen = metrics[reward] > first[reward] + GAIN * first.get("credit/reward_std", 0.0)
        changes |= {} if risen else {LONGER: metrics[length] / first[length]}
    return changes


def compare_with_heldout(accuracy: float | None, heldout_accuracy: float | None) -> dict[str, str]:
    """Return a warning if nearly all completions for training prompts are correct, but few for held-out problems. The
    policy may have memorized the training prompts.

    `heldout_accuracy` is the accuracy after the same iteration, or None if the policy was not evaluated then.
    """
    if accuracy is None or heldout_accuracy is None or accuracy <= RIGHT or heldout_accuracy >= accuracy / 2:
        return {}
    return {
        MEMORIZED: f"Sampled accuracy is {accuracy:.0%}, but held-out accuracy is only {heldout_accuracy:.0%}: the "
        "policy may have memorized the training prompts. Use more training problems, or train fewer iterations "
        "(`rheostat export-policy --iteration` writes an earlier policy)."
    }


def summarize_warnings(warnings: Sequence[Mapping[str, str]], *, first: int = 1) -> list[str]:
    """Summarize the warnings of several iterations: return one line for each kind of warning, with the text of its last
    occurrence. `first` is the number of the first iteration in `warnings`."""
    lines = []
    for metric in dict.fromkeys(metric for each in warnings for metric in each):
        numbers = [number for number, each in enumerate(warnings, start=first) if metric in each]
        where = f"iteration {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} iterations, last in {numbers[-1]}"
        lines.append(f"warning: {where}: {warnings[numbers[-1] - first][metric]}")
    return lines
