"""Configuration of alarms. An alarm watches a metric and, beyond a bound, warns, ends the run or reverts it to an
earlier policy. Torch-free."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import fmean
from typing import Annotated, Final, Literal

from pydantic import Field

from rheostat.infra.config import Positive, Settings
from rheostat.infra.renamed import RenamedFrom, RenamedValue
from rheostat.infra.validation_errors import nearest
from rheostat.models.config.conflicts import JobParts

Measured = Callable[[int], Mapping[str, float]]
"""Function that takes the number of an iteration and returns the metrics stored when the iteration was committed. The
mapping is empty if the iteration was reverted."""

LENGTH: Final = "credit/length_mean"
REWARD: Final = "credit/reward_mean"
SPREAD: Final = "credit/reward_std"
ENTROPY: Final = "update/entropy"

MEASURED: Final = {
    "credit": (
        *("prompts", "completions", "samples", "tokens", "missing", "missing_fraction", "masked", "bad_logprobs"),
        *("groups", "informative_groups", "issued_groups", "trained_groups", "filling_groups", "surplus_groups"),
        *("shortfall_groups", "reward_mean", "reward_std", "group_reward_std_mean", "length_mean"),
        *("truncated_fraction", "turns_mean", "branches_mean", "turn_prompt_tokens_mean", "observation_tokens_mean"),
        *("calls_mean", "call_error_fraction", "ended_stop_fraction", "ended_turns_fraction", "ended_length_fraction"),
        *("ended_failed_fraction", "overlong_penalty_mean", "kl", "kl_coefficient", "teacher_kl", "bad_estimates"),
        *("value_mean", "return_mean", "explained_variance"),
    ),
    "update": (
        *("loss", "entropy", "kl", "kl_old", "kl_coefficient", "clip_fraction_low", "clip_fraction_high"),
        *("dual_clip_fraction", "ratio_mean", "ratio_max", "mismatch_difference_mean", "mismatch_difference_max"),
        *("mismatch_ratio_mean", "mismatch_ratio_max", "mismatch_kl", "mismatch_tokens", "importance_weight_mean"),
        *("behavior_kl", "effective_sample_size", "selected_fraction", "full_entropy", "entropy_coefficient"),
        *("low_entropy_fraction", "entropy_threshold", "teacher_divergence", "positive_nll", "positive_fraction"),
        *("velocity_change_mean", "velocity_change_max"),
        *("importance_truncated", "importance_masked", "stale_fraction", "too_stale_fraction", "grad_norm_mean"),
        *("grad_norm_max", "learning_rate", "steps", "tokens", "samples", "quarantined", "value_loss"),
        *("value_clip_fraction", "value_error_max", "explained_variance", "critic_grad_norm"),
    ),
}
"""Names of the metrics that Rheostat's algorithms and losses record, by stage ("credit" or "update"). Each reward term
adds a mean and a standard deviation."""


class Alarm(Settings):
    """Fields common to all alarms. An alarm compares a training metric with a bound after each iteration."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$")] | None = None
    """Name of the alarm, which must be unique. The default is the alarm's `kind`."""
    action: Annotated[Literal["warn", "stop", "revert"], RenamedValue("return", "revert")] = "warn"
    """Action in addition to a log line and an event. `warn` does nothing else. `stop` ends the run after the iteration.
    `revert` discards the policy: the next iteration starts from the policy that generated the last iteration that was
    not reverted."""
    max_reverts: Annotated[int, Field(ge=0), RenamedFrom("returns")] = 3
    """Maximum number of times that this alarm may revert a run. If it is raised again after that, it ends the run."""

    @property
    def label(self) -> str:
        """Name of the alarm in messages: the configured name, or the kind of the alarm."""
        return self.name or str(getattr(self, "kind", ""))

    def find_breach(self, number: int, measured: Measured) -> str | None:
        """Return a message if the metrics of iteration `number` are beyond the alarm's bound. Return None if they are
        not, or if metrics are missing. `measured` returns the metrics of an iteration."""
        raise NotImplementedError

    def find_conflicts(self, job: JobParts) -> Iterator[str]:
        """Yield one message for each reason why this alarm could never be raised in the job, such as a metric that no
        stage records."""
        yield from ()


class LengthCollapse(Alarm):
    """Alarm that is raised if completions are much shorter than before: their mean length falls below a share of the
    mean length in the preceding iterations."""

    kind: Literal["length_collapse"] = "length_collapse"
    window: Positive = 5
    """Number of preceding iterations whose mean length is the reference. No alarm is raised before the run has that
    many iterations."""
    bound: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the preceding iterations' mean length. The alarm is raised below this share: 0.5 means half of the
    length."""

    def find_breach(self, number: int, measured: Measured) -> str | None:
        """Return a message if the mean completion length in tokens of iteration `number` is below the bound, else
        None."""
        now, before = (
            measured(number).get(LENGTH),
            _collect_values(LENGTH, _iterations_before(number, self.window), measured),
        )
        if now is None or not before or now >= self.bound * fmean(before):
            return None
        usual = f"{self.bound:g} of the {fmean(before):.3g} of the {_describe_window(self.window)} before"
        return f"completions have {now:.3g} tokens on average, less than {usual}"


class RewardDip(Alarm):
    """Alarm that is raised if the mean reward is far below the best mean reward of the preceding iterations."""

    kind: Literal["reward_dip"] = "reward_dip"
    window: Positive = 5
    """Number of preceding iterations from which the best mean reward is taken. No alarm is raised before the run has
    that many iterations."""
    bound: Annotated[float, Field(gt=0)] = 1.0
    """Drop of the mean reward that raises the alarm, in standard deviations of the reward over completions. Of the
    standard deviations of the two compared iterations, the larger one is used."""

    def find_breach(self, number: int, measured: Measured) -> str | None:
        """Return a message if the mean reward of iteration `number` dropped by more than the bound, else None."""
        now = measured(number)
        best = max(
            (each for k in _iterations_before(number, self.window) if REWARD in (each := measured(k))),
            key=lambda each: each[REWARD],
            default=None,
        )
        if best is None or REWARD not in now:
            return None
        spread, fallen = max(best.get(SPREAD, 0.0), now.get(SPREAD, 0.0)), best[REWARD] - now[REWARD]
        if fallen <= self.bound * spread + ROUNDING * abs(best[REWARD]):
            return None
        far = f"more than {self.bound:g} standard deviations ({spread:.3g} each)"
        usual = f"the best of the {_describe_window(self.window)} before, {best[REWARD]:.3g}"
        return f"the mean reward is {now[REWARD]:.3g}, {far} below {usual}"


class EntropyCollapse(Alarm):
    """Alarm that is raised if the entropy is far below its mean in the first iterations. Such a policy hardly explores
    any more."""

    kind: Literal["entropy_collapse"] = "entropy_collapse"
    window: Positive = 5
    """Number of iterations at the start of the run whose mean entropy is the reference. No alarm is raised in these
    iterations."""
    bound: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of the first iterations' mean entropy. The alarm is raised below this share."""

    def find_breach(self, number: int, measured: Measured) -> str | None:
        """Return a message if the entropy of iteration `number` (nats per token) is below the bound, else None."""
        if number <= self.window or ENTROPY not in (now := measured(number)):
            return None
        first = _collect_values(ENTROPY, range(1, self.window + 1), measured)
        if not first or now[ENTROPY] >= self.bound * fmean(first):
            return None
        usual = f"{self.bound:g} of the {fmean(first):.3g} of the first {_describe_window(self.window)}"
        return f"the entropy is {now[ENTROPY]:.3g} nats per token, less than {usual}"


class KlDrift(Alarm):
    """Alarm that is raised if the KL divergence of the policy from the reference exceeds a bound. The alarm needs a KL
    penalty (`update.kl` or `algorithm.kl`), because only a penalty measures the divergence."""

    kind: Literal["kl"] = "kl"
    window: Positive = 1
    """Number of newest iterations whose mean divergence is compared with the bound."""
    bound: Annotated[float, Field(gt=0)] = 1.0
    """KL divergence in nats per token above which the alarm is raised."""

    def find_breach(self, number: int, measured: Measured) -> str | None:
        """Return a message if the KL divergence of the newest iterations exceeds the bound, else None. If the loss has
        no KL penalty, the divergence measured by the KL penalty in the reward is used."""
        now = measured(number)
        metric = next((name for name in ("update/kl", "credit/kl") if name in now), None)
        if (
            metric is None
            or (mean := _mean_of_window(metric, number, self.window, measured)) is None
            or mean <= self.bound
        ):
            return None
        return f"the policy is {mean:.3g} nats per token away from the reference, more than {self.bound:g}"

    def find_conflicts(self, job: JobParts) -> Iterator[str]:
        """Yield a message if no KL penalty is configured, because only a penalty measures the divergence."""
        if job.update.kl_penalty is None and job.algorithm.reward_kl is None:
            yield (
                "this alarm compares the KL divergence from the reference policy, but the run does not measure it. "
                "Set update.kl or algorithm.kl"
            )


class MetricAlarm(Alarm):
    """Alarm that compares any metric of the credit or update stage in `metrics.jsonl` with a bound."""

    kind: Literal["metric"] = "metric"
    metric: str
    """Name of the metric as in `metrics.jsonl`, with its stage, such as `update/grad_norm_max`."""
    side: Literal["above", "below"] = "above"
    """Side of the bound on which the alarm is raised: "above" for metrics that must not become too large, "below" for
    metrics that must not become too small."""
    bound: float
    """Bound for the mean of the metric, in the unit of the metric."""
    window: Positive = 1
    """Number of newest iterations whose mean is compared with the bound."""

    @property
    def label(self) -> str:
        """Name of the alarm in messages: the configured name, or the name of the metric."""
        return self.name or self.metric

    def find_breach(self, number: int, measured: Measured) -> str | None:
        """Return a message if the mean of the metric over the last `window` iterations is beyond the bound, else
        None."""
        mean = _mean_of_window(self.metric, number, self.window, measured)
        if mean is None or not (mean > self.bound if self.side == "above" else mean < self.bound):
            return None
        of = "" if self.window == 1 else f" in the mean of {_describe_window(self.window)}"
        return f"{self.metric} is {mean:.4g}{of}, {self.side} {self.bound:g}"

    def find_conflicts(self, job: JobParts) -> Iterator[str]:
        """Yield a message if no stage records this metric. Metrics of user-defined algorithms and losses are not
        checked."""
        metrics = [f"credit/term_{term}_{of}" for term in job.scoring.terms for of in ("mean", "std")]
        metrics += [f"{stage}/{name}" for stage, names in MEASURED.items() for name in names]
        is_ours = job.algorithm.ships_with("models") and job.update.loss.ships_with("models")
        may_be_theirs = not is_ours and self.metric.startswith(("credit/", "update/"))
        if self.metric not in metrics and not may_be_theirs:
            yield f"metric must be a number that credit or the update records{nearest(self.metric, metrics)}"


AlarmConfig = Annotated[
    LengthCollapse | RewardDip | EntropyCollapse | KlDrift | MetricAlarm, Field(discriminator="kind")
]

ROUNDING: Final = 1e-9
"""Drop of the mean reward, relative to its size, that is ignored. Equal rewards that are summed in another order differ
by less than this because of rounding."""


def find_alarm_conflicts(alarms: Iterable[Alarm], job: JobParts) -> Iterator[str]:
    """Yield one message for each pair of alarms with the same name, and for each alarm that does not fit the job."""
    names = set[str]()
    for alarm in alarms:
        where = f"alarms: {alarm.label!r}"
        if alarm.label in names:
            yield f"{where} is listed twice, but names must be unique. Set `name`"
        names.add(alarm.label)
        yield from (f"{where}: {reason}" for reason in alarm.find_conflicts(job))
        if alarm.action == "revert" and job.rollout.staleness:
            yield (
                f"{where}: action = 'revert' cannot be combined with rollout.staleness = {job.rollout.staleness}, "
                "because the run would train on rollouts that the discarded policies generated ahead. Set "
                "rollout.staleness = 0, or action = 'stop'"
            )


def _iterations_before(number: int, window: int) -> range:
    """Return the numbers of the `window` iterations before iteration `number`, or an empty range if there are fewer.
    Iterations are counted from 1."""
    return range(number - window, number) if number > window else range(0)


def _collect_values(metric: str, numbers: Iterable[int], measured: Measured) -> list[float]:
    return [each[metric] for number in numbers if metric in (each := measured(number))]


def _mean_of_window(metric: str, number: int, window: int, measured: Measured) -> float | None:
    """Return the mean of a metric over the `window` iterations that end with iteration `number`. Return None if this
    iteration lacks the metric or if the run has fewer iterations."""
    if number < window or metric not in measured(number):
        return None
    return fmean(_collect_values(metric, range(number + 1 - window, number + 1), measured))


def _describe_window(window: int) -> str:
    return "iteration" if window == 1 else f"{window} iterations"
