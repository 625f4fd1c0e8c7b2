"""What the numbers of an iteration say is going wrong, and what helps: a line each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WAITED = "environment_share"
"""Share of the seconds of generation in which rollout workers wrote nothing since they waited for environments."""


@dataclass(frozen=True, slots=True)
class Symptom:
    """A metric above a bound."""

    metric: str
    bound: float
    warning: str
    """What is said of it, with a place for its value."""


SYMPTOMS = (
    Symptom(
        "credit/ended_failed_fraction",
        0.0,
        "environments failed {:.1%} of the episodes, which have no score: `rheostat rollouts` shows why",
    ),
    Symptom(
        "credit/call_error_fraction",
        0.25,
        "{:.0%} of the calls cannot be read: rollout.environment.parser has to fit how the template shows calls",
    ),
    Symptom(
        "credit/ended_turns_fraction",
        0.5,
        "{:.0%} of the episodes were ended by rollout.environment.max_turns, and are scored as they stand",
    ),
    Symptom(
        WAITED,
        0.5,
        "rollout workers wrote nothing in {:.0%} of their seconds, since they waited for environments: more episodes "
        "in a shard, or rollout.environment.batches = 2, fill them",
    ),
    Symptom(
        "credit/truncated_fraction",
        0.5,
        "{:.0%} of the completions were cut off at rollout.sampling.max_new_tokens",
    ),
    Symptom(
        "update/kl_old",
        1.0,
        "the update took the policy {:.2g} nats per token away from the one that generated: a lower "
        "update.learning_rate keeps it near",
    ),
    Symptom(
        "update/mismatch_difference_mean",
        0.1,
        "engine and trainer differ by {:.2g} nats per token about the same weights: compare their precision",
    ),
)
"""Most urgent first. Where a run goes well, KL and mismatch are thousandths of a nat."""


def warnings_of(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return what there is to say of an iteration, by metric."""
    found = [(each, metrics[each.metric]) for each in SYMPTOMS if metrics.get(each.metric, 0.0) > each.bound]
    return {each.metric: each.warning.format(value) for each, value in found}


def summed_up(warnings: Sequence[Mapping[str, str]]) -> list[str]:
    """Say once what was said of several iterations, the first of which is 1, as the last of them said it."""
    lines = []
    for metric in dict.fromkeys(metric for each in warnings for metric in each):
        numbers = [number for number, each in enumerate(warnings, start=1) if metric in each]
        where = f"iteration {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} iterations, last in {numbers[-1]}"
        lines.append(f"warning: {where}: {warnings[numbers[-1] - 1][metric]}")
    return lines
