"""Statistics of a run's iterations and evaluations, read from its stored records."""

import re
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Final

from pydantic import Field

from rheostat.infra.config import Settings, read_recorded
from rheostat.infra.costs import Cost, total
from rheostat.infra.counts import format_count
from rheostat.infra.statistics import mean_interval
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import Run
from rheostat.models.config.training import EvaluationConfig
from rheostat.tasks.run.keys import StageKey, evaluation_key, iteration_key, iteration_numbers
from rheostat.tasks.views.diagnosis import WAITED, compare_with_heldout, find_warnings

_TERM_MEAN = re.compile(r"credit/term_(.+)_mean")
STAGES: Final = {
    "rollout": "rollout",
    "scoring": "scoring_after",
    "estimates": "estimates",
    "credit": "credit",
    "update": "update",
}
"""Keys of stage durations in the record of an iteration, by the stage name that users see. These stages run one after
the other."""
_PASS_AT = re.compile(r"pass_at_(\d+)")


class Accuracy(Settings):
    """Accuracy on held-out problems: the mean of the first reward term. A problem with several completions counts with
    their mean."""

    number: int
    """Number of iterations before the evaluation."""
    problems: int
    """Number of problems that were scored."""
    mean: float
    """Mean of the first reward term. If the term is 0 or 1, this is the fraction of solved problems."""
    low: float
    """Lower end of the 95% confidence interval. If the mean of every problem is 0 or 1, this is Wilson's interval,
    otherwise the normal interval. If the scores of all completions are 0 or 1, it is limited to 0 to 1."""
    high: float
    """Upper end of the 95% confidence interval."""
    samples: int = Field(default=1, exclude_if=lambda samples: samples == 1)
    """Number of completions per problem."""
    temperature: float | None = Field(default=None, exclude_if=lambda temperature: temperature is None)
    """Sampling temperature of the completions: 0 is greedy decoding, None is unknown."""
    pass_at: dict[int, float] = Field(default={}, exclude_if=lambda shares: not shares)
    """Fraction of problems solved by at least one of k completions, by k. Empty for a single completion or
    graded term."""

    @property
    def evaluation_text(self) -> str:
        """Text that states the number of problems, the completions per problem, and the sampling method."""
        several = f" with {self.samples} completions each" if self.samples > 1 else ""
        sampling = "" if self.temperature is None else f", {self.sampling_method}"
        return format_count(self.problems, "problem") + several + sampling

    @property
    def sampling_method(self) -> str:
        """Sampling method of the completions: "sampled" or "greedy"."""
        return "sampled" if self.temperature else "greedy"

    @property
    def pass_at_text(self) -> str:
        """Text with pass@k for each k, starting with a comma. Empty if pass@k was not computed."""
        return "".join(f", pass@{k} {share:.3f}" for k, share in self.pass_at.items())

    def line(self) -> str:
        """Return the accuracy, its 95% interval and how it was measured as one line for the terminal."""
        return f"{self.interval[:-1]}, {self.evaluation_text}){self.pass_at_text}"

    @property
    def interval(self) -> str:
        """Text with the accuracy and its 95% interval."""
        return f"{self.mean:.3f} (95% interval {self.low:.3f} to {self.high:.3f})"


class EpisodesReport(Settings):
    """Statistics of the episodes (dialogues with an environment) in one iteration."""

    turns: float
    """Mean number of turns of the policy per episode."""
    calls: float
    """Mean number of tool calls per episode."""
    call_errors: float | None
    """Fraction of the tool calls that could not be parsed, or None if there was no call."""
    endings: dict[str, float]
    """Fraction of the episodes that ended for each reason: `stop`, `turns`, `length`, `failed`."""
    answer_seconds: float
    """Time that environments took to respond, in seconds, summed over turns. Many turns are answered in parallel."""
    environment_seconds: float
    """Time in which rollout workers were idle because they waited for environments, in seconds, summed over shards."""

    def cells(self) -> dict[str, str]:
        """Return the statistics as formatted cells of a table, by column heading."""
        endings = ", ".join(f"{reason} {share:.0%}" for reason, share in self.endings.items() if share)
        return {
            "turns": format_number(self.turns, digits=2),
            "calls": format_number(self.calls, digits=2),
            "unparsed calls": format_number(self.call_errors),
            "ended by": endings,
            "environment s": f"{self.answer_seconds:.2f}",
            "idle s": f"{self.environment_seconds:.2f}",
        }


class IterationReport(Settings):
    """Statistics of one iteration: rewards, lengths, update, durations and costs."""

    iteration: int
    """Number of the iteration, counted from 1."""
    accuracy: float | None
    """Mean of the first reward term over the iteration's completions, or None if no completion was finished and
    scored."""
    reward: float | None
    """Mean total reward over the iteration's completions."""
    reward_std: float | None = None
    """Standard deviation of the total reward over completions."""
    terms: dict[str, float] = {}
    """Mean of each reward term before its weight."""
    informative: float | None = None
    """Fraction of groups with different rewards, which are the groups that train the policy. None if there are no
    groups."""
    length: float | None
    """Mean completion length in tokens."""
    truncated: float | None = None
    """Fraction of the completions that were cut off at the maximum length."""
    entropy: float | None = None
    """Mean entropy of the policy over the tokens that the update trained on, in nats. None if the update trained on no
    token."""
    grad_norm: float | None = None
    """Mean gradient norm over the update's steps, before clipping."""
    grad_norm_max: float | None = None
    """Maximum gradient norm over the update's steps, before clipping."""
    clip_low: float | None = None
    """Fraction of tokens whose policy ratio the loss clipped at the lower bound."""
    clip_high: float | None = None
    """Fraction of tokens whose policy ratio the loss clipped at the upper bound."""
    kl: float
    """Mean divergence of the updated policy from the policy that generated, in nats per token (k3 estimator)."""
    mismatch: float | None
    """Mean |log π_train − log π_behaviour| over tokens generated by the policy version that the update started from.
    The weights are the same, so this measures the numerical difference between trainer and engine. None if nothing was
    compared."""
    mismatch_max: float | None
    """Maximum over tokens of |log π_train − log π_behaviour|, whose mean is `mismatch`. None if nothing was compared.
    """
    importance_weight: float | None
    """Mean weight by which the mismatch correction multiplied the loss. 1 means no correction."""
    importance_cut: float | None
    """Fraction of tokens whose importance weight was limited by the mismatch correction."""
    missing: int
    """Number of completions without a score."""
    quarantined: bool
    """Whether the update was refused because of NaN or Inf."""
    policy: str
    """Digest of the policy's weights after the iteration. If an alarm reverted the run, this is the policy that it
    reverted to."""
    seconds: dict[str, float]
    """Seconds per stage and in total. `scoring` is summed over workers. `scoring_after` is the scoring time after
    generation ended, and `between` is the time that belongs to no stage, such as commits and weight transfers."""
    weights_bytes: int
    """Bytes of weights moved to rollout engines, summed over all workers."""
    weights_seconds: float
    """Time of the weight transfers in seconds, summed over workers. Includes the start of a server if one was
    started."""
    episodes: EpisodesReport | None = None
    """Statistics of episodes, or None if the run has no environment."""
    warnings: dict[str, str] = {}
    """Warnings about the iteration, by the name of the metric or of the alarm."""
    requests: dict[str, int] = {}
    """Number of requests by HTTP verb that the driver of the run sent to a store in a bucket since the previous
    iteration. Requests of workers are not included."""
    costs: dict[str, Cost] = {}
    """Costs of the iteration by role, such as "rollout"."""

    @property
    def stages(self) -> dict[str, float]:
        """Seconds by stage, in order. They add up to the total, with `between` for the time that belongs to
        no stage."""
        return {shown_as: self.seconds.get(name, 0.0) for shown_as, name in {**STAGES, "between": "between"}.items()}

    def line(self, total: int) -> str:
        """Return reward, length, KL and duration as one line for the terminal. The caller appends the
        remaining time."""
        reward = "" if self.reward == self.accuracy else f"  reward {format_number(self.reward)}"
        note = "  QUARANTINED: NaN or Inf, weights unchanged" if self.quarantined else ""
        return (
            f"iteration {self.iteration:>3}/{total}  sampled accuracy {format_number(self.accuracy)}{reward}  "
            f"length {_format_brief(self.length)}  kl {self.kl:.4f}  {_format_brief(self.seconds['total'])} s{note}"
        )


def mean_stages(reports: Sequence[IterationReport]) -> dict[str, float]:
    """Return the mean seconds of an iteration by stage. The values add up to the mean total."""
    return {name: fmean(report.stages[name] for report in reports) for name in (reports[0].stages if reports else ())}


def iteration_table(reports: Sequence[IterationReport]) -> list[dict[str, object]]:
    """Return one table row per iteration for Prefect. Its UI shows about six columns without scrolling, so the most
    useful columns come first."""
    return [
        {
            "iteration": report.iteration,
            "sampled accuracy": format_number(report.accuracy),
            "reward": format_number(report.reward),
            "length": format_number(report.length, digits=1),
            "truncated": format_percent(report.truncated),
            "entropy": format_number(report.entropy),
            "kl": round(report.kl, 4),
            "gradient norm": format_number(report.grad_norm),
            "informative": format_percent(report.informative),
            **(
                {f"reward {term}": format_number(mean) for term, mean in report.terms.items()}
                if len(report.terms) > 1
                else {}
            ),
            "reward spread": format_number(report.reward_std),
            "clipped low": format_percent(report.clip_low),
            "clipped high": format_percent(report.clip_high),
            "mismatch": format_scientific(report.mismatch),
            "missing": report.missing,
            **({} if report.episodes is None else report.episodes.cells()),
            "total seconds": round(report.seconds["total"], 2),
            **{f"{name} seconds": round(value, 2) for name, value in report.stages.items()},
            **(total(report.costs.values()).cells() if report.costs else {}),
            "quarantined": report.quarantined,
            "policy": report.policy[:16],
            "warnings": "; ".join(report.warnings.values()),
        }
        for report in reports
    ]


def format_number(value: float | None, *, digits: int = 3) -> str:
    """Format a number, or return a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def _format_brief(value: float | None) -> str:
    """Format a number, with one decimal if it is below 100."""
    return format_number(value, digits=1 if value is None or value < 100 else 0)


def format_percent(value: float | None) -> str:
    """Format a share as a percentage, or return a dash for None."""
    return "-" if value is None else f"{value:.1%}"


def format_scientific(value: float | None) -> str:
    """Format a number in scientific notation, or return a dash for None."""
    return "-" if value is None else f"{value:.1e}"


def read_report(sealed: Manifest, *, term: str, first: Manifest | None = None) -> IterationReport:
    """Read the statistics of an iteration from its seal (the last record of the iteration).

    `term` names the reward term that is reported as accuracy. `first` is the seal of the run's first iteration and
    enables warnings about changes since then.
    """
    metrics, seconds = sealed.metrics, dict(sealed.provenance.seconds)
    compared = metrics.get("update/mismatch_tokens", 0) > 0
    environment_seconds = {name: seconds.pop(name, 0.0) for name in ("environment", "answering", "generating")}
    share = (
        {WAITED: environment_seconds["environment"] / environment_seconds["generating"]}
        if environment_seconds["generating"]
        else {}
    )
    accuracy, groups = metrics.get(f"credit/term_{term}_mean"), metrics.get("credit/groups", 0)
    first_metrics = None if first is None else first.metrics
    return IterationReport(
        iteration=StageKey.parse(sealed.key).iteration,
        accuracy=accuracy,
        reward=metrics.get("credit/reward_mean"),
        reward_std=metrics.get("credit/reward_std"),
        terms={match[1]: mean for name, mean in metrics.items() if (match := _TERM_MEAN.fullmatch(name))},
        informative=metrics.get("credit/informative_groups", 0) / groups if groups else None,
        length=metrics.get("credit/length_mean"),
        truncated=metrics.get("credit/truncated_fraction"),
        entropy=metrics.get("update/entropy"),
        grad_norm=metrics.get("update/grad_norm_mean"),
        grad_norm_max=metrics.get("update/grad_norm_max"),
        clip_low=metrics.get("update/clip_fraction_low"),
        clip_high=metrics.get("update/clip_fraction_high"),
        kl=metrics.get("update/kl_old", 0.0),
        mismatch=metrics["update/mismatch_difference_mean"] if compared else None,
        mismatch_max=metrics["update/mismatch_difference_max"] if compared else None,
        importance_weight=metrics.get("update/importance_weight_mean"),
        importance_cut=_limited_share(metrics),
        missing=int(metrics["credit/missing"]),
        quarantined=bool(metrics["update/quarantined"]),
        policy=str(sealed.detail["policy"]),
        weights_bytes=int(seconds.pop("weights_bytes")),
        weights_seconds=seconds.pop("weights_seconds"),
        seconds=_with_time_between(seconds),
        episodes=_episodes_report(metrics, environment_seconds),
        warnings=find_warnings(metrics | share, first=first_metrics, accuracy=accuracy) | sealed.provenance.alarms,
        requests=sealed.provenance.requests,
        costs=sealed.provenance.costs,
    )


def _with_time_between(seconds: dict[str, float]) -> dict[str, float]:
    """Add the entry `between` with the seconds that belong to no stage. For scoring, only the time after generation
    counts, because earlier scoring runs in parallel with generation."""
    stages = sum(seconds.get(name, 0.0) for name in STAGES.values())
    return {**seconds, "between": max(0.0, seconds["total"] - stages)}


def _episodes_report(metrics: Mapping[str, float], seconds: Mapping[str, float]) -> EpisodesReport | None:
    if "credit/turns_mean" not in metrics:
        return None
    ended = re.compile(r"credit/ended_(\w+)_fraction")
    return EpisodesReport(
        turns=metrics["credit/turns_mean"],
        calls=metrics["credit/calls_mean"],
        call_errors=metrics.get("credit/call_error_fraction"),
        endings={match[1]: share for name, share in metrics.items() if (match := ended.fullmatch(name))},
        answer_seconds=seconds["answering"],
        environment_seconds=seconds["environment"],
    )


def _limited_share(metrics: Mapping[str, float]) -> float | None:
    """Return the fraction of tokens with a limited importance weight, or None if no token was weighted."""
    if "update/importance_truncated" not in metrics:
        return None
    return metrics["update/importance_truncated"] + metrics["update/importance_masked"]


def evaluations_of(run: Run) -> list[Accuracy]:
    """Return every held-out evaluation of a run, in order."""
    summaries = [(each, StageKey.parse(each.key).evaluation) for each in _evaluation_summaries(run)]
    return [accuracy_of(each, temperature=evaluation_temperature(run, number)) for each, number in summaries]


def evaluation_temperature(run: Run, number: int) -> float:
    """Return the sampling temperature of a run's held-out evaluation after iteration `number`."""
    is_shared = run.inherits(StageKey.of(evaluation_key(number), "summary"))
    config = run.config_at(number) if is_shared else run.record.config
    return read_recorded(EvaluationConfig, config.get("evaluation", {})).temperature


def _evaluation_summaries(run: Run) -> list[Manifest]:
    keys = (StageKey.of(folder, "summary") for folder in run.folders() if folder.startswith("eval-"))
    return [summary for key in keys if (summary := run.find(key)) is not None]


def sealed_iterations(run: Run) -> list[Manifest]:
    """Return the final record (seal) of each completed iteration, in order. Seals that were read before cost no store
    request."""
    numbers = iteration_numbers(run.folders())
    seals = (run.find(StageKey.of(iteration_key(number), "seal")) for number in numbers)
    return [sealed for sealed in seals if sealed is not None]


def run_costs(run: Run) -> dict[str, Cost]:
    """Return the costs of all completed iterations and evaluations of a run, summed by role. The costs of iterations
    that a fork shares are left out."""
    parts = [each for each in (*sealed_iterations(run), *_evaluation_summaries(run)) if not run.inherits(each.key)]
    costs_of_parts = [manifest.provenance.costs for manifest in parts]
    roles = dict.fromkeys(role for costs in costs_of_parts for role in costs)
    return {role: total(costs[role] for costs in costs_of_parts if role in costs) for role in roles}


def reports_of(run: Run, *, term: str) -> list[IterationReport]:
    """Return the statistics of every completed iteration. `term` names the reward term that is reported as accuracy."""
    seals, heldout = sealed_iterations(run), {each.number: each.mean for each in evaluations_of(run)}
    reports = [read_report(sealed, term=term, first=seals[0]) for sealed in seals]
    found = [compare_with_heldout(each.accuracy, heldout.get(each.iteration)) for each in reports]
    return [
        each.model_copy(update={"warnings": each.warnings | more}) for each, more in zip(reports, found, strict=True)
    ]


def newest_reports(run: Run, number: int, *, limit: int, term: str) -> list[IterationReport]:
    """Return the statistics of up to `limit` iterations that end with iteration `number`. Other iterations are not
    read, except the first, which warnings compare with."""
    keys = [StageKey.of(iteration_key(each), "seal") for each in (1, *range(max(1, number + 1 - limit), number + 1))]
    first, *seals = [run.require(key) for key in keys]
    return [read_report(sealed, term=term, first=first) for sealed in seals]


def accuracy_of(summary: Manifest, *, temperature: float | None = None) -> Accuracy:
    """Read the accuracy of an evaluation from the record of its last stage ("summary")."""
    mean, problems = summary.metrics["accuracy"], int(summary.metrics["problems"])
    low, high = mean_interval(mean * problems, summary.metrics["squares"], problems)
    pass_rates = {
        int(match[1]): share for name, share in summary.metrics.items() if (match := _PASS_AT.fullmatch(name))
    }
    if pass_rates:  # every score is 0 or 1
        low, high = max(low, 0.0), min(high, 1.0)
    return Accuracy(
        number=StageKey.parse(summary.key).evaluation,
        problems=problems,
        mean=mean,
        low=low,
        high=high,
        samples=int(summary.metrics.get("samples", 1)),
        temperature=temperature,
        pass_at=dict(sorted(pass_rates.items())),
    )
