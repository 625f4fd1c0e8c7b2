"""Configuration of alarms: numbers of a run that, beyond a bound, warn, end it, or have it return. Torch-free."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import fmean
from typing import Annotated, Final, Literal

from pydantic import Field

from infra.config import Positive, Settings
from infra.validation_errors import nearest
from models.config.job import Job

Measured = Callable[[int], Mapping[str, float]]
"""What an iteration measured, as its seal names it, by its number; one that a run returned from measured nothing."""

LENGTH: Final = "credit/length_mean"
REWARD: Final = "credit/reward_mean"
SPREAD: Final = "credit/reward_std"
ENTROPY: Final = "update/entropy"

MEASURED: Final = {
    "credit": (
        *("prompts", "completions", "samples", "tokens", "missing", "missing_fraction", "masked", "bad_logprobs"),
        *("groups", "informative_groups", "issued_groups", "trained_groups", "filling_groups", "surplus_groups"),
        *("shortfall_groups", "reward_mean", "reward_std", "group_reward_std_mean", "length_mean"),
        *("truncated_fraction", "turns_mean", "turn_prompt_tokens_mean", "observation_tokens_mean", "calls_mean"),
        *("call_error_fraction", "ended_stop_fraction", "ended_turns_fraction", "ended_length_fraction"),
        *("ended_failed_fraction", "overlong_penalty_mean", "kl", "kl_coefficient", "teacher_kl", "bad_estimates"),
        *("value_mean", "return_mean", "explained_variance"),
    ),
    "update": (
        *("loss", "entropy", "kl", "kl_old", "kl_coefficient", "clip_fraction_low", "clip_fraction_high"),
        *("dual_clip_fraction", "ratio_mean", "ratio_max", "mismatch_difference_mean", "mismatch_difference_max"),
        *("mismatch_ratio_mean", "mismatch_ratio_max", "mismatch_kl", "mismatch_tokens", "importance_weight_mean"),
        *("importance_truncated", "importance_masked", "stale_fraction", "too_stale_fraction", "grad_norm_mean"),
        *("grad_norm_max", "learning_rate", "steps", "tokens", "samples", "quarantined", "value_loss"),
        *("value_clip_fraction", "value_error_max", "explained_variance", "critic_grad_norm"),
    ),
}
"""Numbers that algorithms and losses of ours measure, by stage; of reward terms there are a mean and a spread, too."""


class Alarm(Settings):
    """What all alarms share."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$")] | None = None
    """What it is called; none takes its kind. Each name is there once."""
    action: Literal["warn", "stop", "return"] = "warn"
    """Beside a line and an event: `stop` ends the run after the iteration, `return` has the next one begin with the
    policy that generated the last iteration without a return."""
    returns: Annotated[int, Field(ge=0)] = 3
    """How often it may have a run return; one more also ends the run."""

    @property
    def known_as(self) -> str:
        """What messages call it."""
        return self.name or str(getattr(self, "kind", ""))

    def raised(self, number: int, measured: Measured) -> str | None:
        """Say what of an iteration is beyond the bound; none where nothing is, or too little is known."""
        raise NotImplementedError

    def reasons_against(self, job: Job) -> Iterator[str]:
        """Yield why a job would never raise it."""
        yield from ()


class LengthCollapse(Alarm):
    """Completions are far shorter than they were: their mean length against that of the iterations before."""

    kind: Literal["length_collapse"] = "length_collapse"
    window: Positive = 5
    """Iterations before that are compared with; the first ones raise nothing."""
    bound: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of their mean length below which it is raised."""

    def raised(self, number: int, measured: Measured) -> str | None:
        """Compare mean lengths in tokens."""
        now, before = measured(number).get(LENGTH), _values(LENGTH, _before(number, self.window), measured)
        if now is None or not before or now >= self.bound * fmean(before):
            return None
        usual = f"{self.bound:g} of the {fmean(before):.3g} of the {_iterations(self.window)} before"
        return f"completions have {now:.3g} tokens on average, less than {usual}"


class RewardDip(Alarm):
    """The mean reward is far below the best of the iterations before."""

    kind: Literal["reward_dip"] = "reward_dip"
    window: Positive = 5
    """Iterations before whose best is compared with; the first ones raise nothing."""
    bound: Annotated[float, Field(gt=0)] = 1.0
    """How far below it is raised, in standard deviations of the reward over completions: of the two iterations' that
    are compared the larger."""

    def raised(self, number: int, measured: Measured) -> str | None:
        """Compare mean rewards."""
        now = measured(number)
        best = max(
            (each for k in _before(number, self.window) if REWARD in (each := measured(k))),
            key=lambda each: each[REWARD],
            default=None,
        )
        if best is None or REWARD not in now:
            return None
        spread, fallen = max(best.get(SPREAD, 0.0), now.get(SPREAD, 0.0)), best[REWARD] - now[REWARD]
        if fallen <= self.bound * spread + ROUNDING * abs(best[REWARD]):
            return None
        far = f"more than {self.bound:g} standard deviations ({spread:.3g} each)"
        usual = f"the best of the {_iterations(self.window)} before, {best[REWARD]:.3g}"
        return f"the mean reward is {now[REWARD]:.3g}, {far} below {usual}"


class EntropyCollapse(Alarm):
    """Little is left of the entropy of the first iterations: the policy tries little that is new."""

    kind: Literal["entropy_collapse"] = "entropy_collapse"
    window: Positive = 5
    """First iterations that are compared with, which raise nothing."""
    bound: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of their mean entropy below which it is raised."""

    def raised(self, number: int, measured: Measured) -> str | None:
        """Compare entropies in nats per token."""
        if number <= self.window or ENTROPY not in (now := measured(number)):
            return None
        first = _values(ENTROPY, range(1, self.window + 1), measured)
        if not first or now[ENTROPY] >= self.bound * fmean(first):
            return None
        usual = f"{self.bound:g} of the {fmean(first):.3g} of the first {_iterations(self.window)}"
        return f"the entropy is {now[ENTROPY]:.3g} nats per token, less than {usual}"


class KlDrift(Alarm):
    """The policy is far from the reference, where the run began, as far as a KL penalty measures that."""

    kind: Literal["kl"] = "kl"
    window: Positive = 1
    """Iterations whose mean is compared, the newest among them."""
    bound: Annotated[float, Field(gt=0)] = 1.0
    """Nats per token above which it is raised."""

    def raised(self, number: int, measured: Measured) -> str | None:
        """Compare the divergence that the loss measures, or else the reward."""
        now = measured(number)
        metric = next((name for name in ("update/kl", "credit/kl") if name in now), None)
        if metric is None or (mean := _mean(metric, number, self.window, measured)) is None or mean <= self.bound:
            return None
        return f"the policy is {mean:.3g} nats per token away from the reference, more than {self.bound:g}"

    def reasons_against(self, job: Job) -> Iterator[str]:
        """A divergence from the reference is measured where it costs something."""
        if job.update.kl_penalty is None and job.algorithm.reward_kl is None:
            yield "nothing measures KL to the reference: expected update.kl or algorithm.kl"


class MetricAlarm(Alarm):
    """Any number of `metrics.jsonl` that credit or the update measures, against a bound."""

    kind: Literal["metric"] = "metric"
    metric: str
    """Its name there, such as `update/grad_norm_max`."""
    side: Literal["above", "below"] = "above"
    """Of the bound, where it is raised."""
    bound: float
    """In the number's own unit."""
    window: Positive = 1
    """Iterations whose mean is compared, the newest among them."""

    @property
    def known_as(self) -> str:
        """What messages call it."""
        return self.name or self.metric

    def raised(self, number: int, measured: Measured) -> str | None:
        """Compare the mean with the bound."""
        mean = _mean(self.metric, number, self.window, measured)
        if mean is None or not (mean > self.bound if self.side == "above" else mean < self.bound):
            return None
        of = "" if self.window == 1 else f" in the mean of {_iterations(self.window)}"
        return f"{self.metric} is {mean:.4g}{of}, {self.side} {self.bound:g}"

    def reasons_against(self, job: Job) -> Iterator[str]:
        """Its name is one that is measured; what code of the user's own measures beside is not known."""
        known = [f"credit/term_{term}_{of}" for term in job.scoring.terms for of in ("mean", "std")]
        known += [f"{stage}/{name}" for stage, names in MEASURED.items() for name in names]
        is_ours = job.algorithm.ships_with("models") and job.update.loss.ships_with("models")
        may_be_theirs = not is_ours and self.metric.startswith(("credit/", "update/"))
        if self.metric not in known and not may_be_theirs:
            yield f"expected a number of metrics.jsonl of credit or the update{nearest(self.metric, known)}"


AlarmConfig = Annotated[
    LengthCollapse | RewardDip | EntropyCollapse | KlDrift | MetricAlarm, Field(discriminator="kind")
]

ROUNDING: Final = 1e-9
"""Share of a mean that is no dip: the same rewards, summed in another number, differ by less."""


def alarms_against(alarms: Iterable[Alarm], job: Job) -> Iterator[str]:
    """Yield what of a job's alarms does not go together, or with the job."""
    seen = set[str]()
    for alarm in alarms:
        where = f"alarms: {alarm.known_as!r}"
        if alarm.known_as in seen:
            yield f"{where} is there twice: expected each name once, given by `name`"
        seen.add(alarm.known_as)
        yield from (f"{where}: {reason}" for reason in alarm.reasons_against(job))
        if alarm.action == "return" and job.rollout.staleness:
            yield (
                f"{where}: action 'return' would learn from rollouts that the discarded policies have generated ahead, "
                f"with rollout.staleness {job.rollout.staleness}: expected 0, or action 'stop'"
            )


def _before(number: int, window: int) -> range:
    """The iterations of a window before an iteration; none as long as there are fewer."""
    return range(number - window, number) if number > window else range(0)


def _values(metric: str, numbers: Iterable[int], measured: Measured) -> list[float]:
    return [each[metric] for number in numbers if metric in (each := measured(number))]


def _mean(metric: str, number: int, window: int, measured: Measured) -> float | None:
    """Mean over a window that ends with an iteration; none where that did not measure it, or the window is not full."""
    if number < window or metric not in measured(number):
        return None
    return fmean(_values(metric, range(number + 1 - window, number + 1), measured))


def _iterations(window: int) -> str:
    return "iteration" if window == 1 else f"{window} iterations"
