"""A run in numbers, read from its manifests."""

import re
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Final

from pydantic import Field

from infra.config import Settings, read_recorded
from infra.costs import Cost, total
from infra.statistics import mean_interval
from infra.store.manifests import Manifest
from infra.store.runs import Run
from models.config.training import EvaluationConfig
from tasks.run.keys import StageKey, iteration_key, iterations_among
from tasks.views.diagnosis import WAITED, warnings_of

_TERM_MEAN = re.compile(r"credit/term_(.+)_mean")
STAGES: Final = {
    "rollout": "rollout",
    "scoring": "scoring_after",
    "estimates": "estimates",
    "credit": "credit",
    "update": "update",
}
"""What an iteration waits for, one after the other: names of seconds in its seal by how people read them."""
_PASS_AT = re.compile(r"pass_at_(\d+)")


class Accuracy(Settings):
    """Share of held-out problems solved, by the first reward term; of several completions their mean."""

    number: int
    """Iterations before the evaluation."""
    problems: int
    """Problems scored."""
    mean: float
    """Mean of the first reward term; the share solved where that term is 0 or 1."""
    low: float
    """Lower end of the 95% interval; Wilson's where the term is 0 or 1."""
    high: float
    """Upper end."""
    samples: int = Field(default=1, exclude_if=lambda samples: samples == 1)
    """Completions of each problem."""
    temperature: float | None = Field(default=None, exclude_if=lambda temperature: temperature is None)
    """At which the completions were sampled; 0 is greedy, none is not known."""
    pass_at: dict[int, float] = Field(default={}, exclude_if=lambda shares: not shares)
    """Share of problems that one of k completions solves, by k; none of one completion, or of a graded term."""

    @property
    def asked(self) -> str:
        """How many problems, completions of each where these are several, and how they were chosen."""
        several = f" of {self.samples} samples" if self.samples > 1 else ""
        return f"{self.problems} problems{several}{'' if self.temperature is None else f', {self.chosen}'}"

    @property
    def chosen(self) -> str:
        """How the tokens of completions were chosen."""
        return "sampled" if self.temperature else "greedy"

    @property
    def passed(self) -> str:
        """The shares that k completions solve; nothing where there are none."""
        return "".join(f", pass@{k} {share:.3f}" for k, share in self.pass_at.items())

    def line(self) -> str:
        """The accuracy with its interval."""
        return f"{self.interval[:-1]}, {self.asked}){self.passed}"

    @property
    def interval(self) -> str:
        """The accuracy with its interval alone."""
        return f"{self.mean:.3f} (95% interval {self.low:.3f} to {self.high:.3f})"


class EpisodesReport(Settings):
    """Episodes of an iteration in numbers."""

    turns: float
    """Mean turns of the policy."""
    calls: float
    """Mean calls of tools."""
    call_errors: float | None
    """Share of the calls that could not be read; none where there was no call."""
    endings: dict[str, float]
    """Share of the episodes by how they ended: `stop`, `turns`, `length`, `failed`."""
    answer_seconds: float
    """Seconds that environments took to answer, summed over turns, of which many are answered side by side."""
    environment_seconds: float
    """Seconds in which rollout workers wrote nothing since they waited for environments, summed over shards."""

    def cells(self) -> dict[str, str]:
        """The numbers as tables show them."""
        endings = ", ".join(f"{reason} {share:.0%}" for reason, share in self.endings.items() if share)
        return {
            "turns": shown(self.turns, digits=2),
            "calls": shown(self.calls, digits=2),
            "unreadable": shown(self.call_errors),
            "endings": endings,
            "answers s": f"{self.answer_seconds:.2f}",
            "waited s": f"{self.environment_seconds:.2f}",
        }


class IterationReport(Settings):
    """One iteration in numbers."""

    iteration: int
    """Counted from 1."""
    accuracy: float | None
    """Mean of the first reward term over the iteration's completions; none where none was finished and scored."""
    reward: float | None
    """Mean total reward."""
    reward_std: float | None = None
    """Standard deviation of the total reward over completions."""
    terms: dict[str, float] = {}
    """Mean of each reward term, before its weight."""
    informative: float | None = None
    """Share of the groups whose completions differ in their reward, which teach something; none without groups."""
    length: float | None
    """Mean completion length in tokens."""
    truncated: float | None = None
    """Share of the completions that were cut off at the longest length."""
    entropy: float | None = None
    """Mean entropy of the policy over the tokens that it learnt from, in nats; none where nothing was learnt."""
    grad_norm: float | None = None
    """Mean norm of the gradient over the update's steps, before it is clipped."""
    grad_norm_max: float | None = None
    """The largest."""
    clip_low: float | None = None
    """Share of tokens whose ratio of policies the loss clipped from below."""
    clip_high: float | None = None
    """The same from above."""
    kl: float
    """Mean divergence of the updated policy from the one that generated, per token (k3)."""
    mismatch: float | None
    """Mean |log π_train − log π_behaviour| of tokens that the updated policy's parent wrote: the same weights in the
    trainer's and in the engine's arithmetic. None where nothing was compared."""
    mismatch_max: float | None
    """The largest of these differences."""
    importance_weight: float | None
    """Mean weight by which the correction of the mismatch multiplied the loss; 1 corrects nothing."""
    importance_cut: float | None
    """Share of tokens whose weight the correction's cap or band cut."""
    missing: int
    """Completions without a score."""
    quarantined: bool
    """Whether the update was refused because of NaN or Inf."""
    policy: str
    """Digest of the weights after the update, or of those that an alarm had the run return to."""
    seconds: dict[str, float]
    """Seconds per stage, summed over workers of scoring, and in total; `scoring_after` is what scoring took after
    generation, `between` what no stage took: commits, weights on their way, the seal."""
    weights_bytes: int
    """Weights that were moved to rollout engines, over all workers."""
    weights_seconds: float
    """Seconds that this took, summed over workers; with the start of a server where there was one."""
    episodes: EpisodesReport | None = None
    """What became of its episodes; none where no environment answers."""
    warnings: dict[str, str] = {}
    """What these numbers say is going wrong, by metric, or by the name of an alarm."""
    requests: dict[str, int] = {}
    """What the process that drives the run asked its store in a bucket between the seal before and this one, by verb;
    workers ask besides."""
    costs: dict[str, Cost] = {}
    """What it took, by role."""

    @property
    def stages(self) -> dict[str, float]:
        """The seconds that add up to the total, by stage in their order, and what no stage took."""
        return {shown_as: self.seconds.get(name, 0.0) for shown_as, name in {**STAGES, "between": "between"}.items()}

    def line(self, total: int) -> str:
        """The report as one line of a terminal, which has room for the time that is left."""
        reward = "" if self.reward == self.accuracy else f"  reward {shown(self.reward)}"
        note = "  QUARANTINED: NaN or Inf, weights unchanged" if self.quarantined else ""
        return (
            f"iteration {self.iteration:>3}/{total}  sampled accuracy {shown(self.accuracy)}{reward}  "
            f"length {_brief(self.length)}  kl {self.kl:.4f}  {_brief(self.seconds['total'])} s{note}"
        )


def mean_stages(reports: Sequence[IterationReport]) -> dict[str, float]:
    """Mean seconds of an iteration by stage; they add up to the mean of the total."""
    return {name: fmean(report.stages[name] for report in reports) for name in (reports[0].stages if reports else ())}


def iteration_table(reports: Sequence[IterationReport]) -> list[dict[str, object]]:
    """Lay iterations out as rows. The UI shows some six columns before it scrolls: what people look for comes first."""
    return [
        {
            "iteration": report.iteration,
            "sampled accuracy": shown(report.accuracy),
            "reward": shown(report.reward),
            "length": shown(report.length, digits=1),
            "truncated": percent(report.truncated),
            "entropy": shown(report.entropy),
            "kl": round(report.kl, 4),
            "gradient norm": shown(report.grad_norm),
            "informative": percent(report.informative),
            **({f"reward {term}": shown(mean) for term, mean in report.terms.items()} if len(report.terms) > 1 else {}),
            "reward spread": shown(report.reward_std),
            "clipped low": percent(report.clip_low),
            "clipped high": percent(report.clip_high),
            "mismatch": small(report.mismatch),
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


def shown(value: float | None, *, digits: int = 3) -> str:
    """A number as people read it, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def _brief(value: float | None) -> str:
    """A number with a decimal as long as that says something."""
    return shown(value, digits=1 if value is None or value < 100 else 0)


def percent(value: float | None) -> str:
    """A share as people read it, or a dash where there is none."""
    return "-" if value is None else f"{value:.1%}"


def small(value: float | None) -> str:
    """A number whose magnitude is what counts, or a dash where there is none."""
    return "-" if value is None else f"{value:.1e}"


def report_of(sealed: Manifest, *, term: str, first: Manifest | None = None) -> IterationReport:
    """Read an iteration's seal; `first` is that of the run's first iteration, which tells what has changed."""
    metrics, seconds = sealed.metrics, dict(sealed.provenance.seconds)
    compared = metrics.get("update/mismatch_tokens", 0) > 0
    told = {name: seconds.pop(name, 0.0) for name in ("environment", "answering", "generating")}
    share = {WAITED: told["environment"] / told["generating"]} if told["generating"] else {}
    accuracy, groups = metrics.get(f"credit/term_{term}_mean"), metrics.get("credit/groups", 0)
    began = None if first is None else first.metrics
    return IterationReport(
        iteration=StageKey.parse(sealed.key).iteration,
        accuracy=accuracy,
        reward=metrics.get("credit/reward_mean"),
        reward_std=metrics.get("credit/reward_std"),
        terms={found[1]: mean for name, mean in metrics.items() if (found := _TERM_MEAN.fullmatch(name))},
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
        importance_cut=_cut(metrics),
        missing=int(metrics["credit/missing"]),
        quarantined=bool(metrics["update/quarantined"]),
        policy=str(sealed.detail["policy"]),
        weights_bytes=int(seconds.pop("weights_bytes")),
        weights_seconds=seconds.pop("weights_seconds"),
        seconds=_with_the_rest(seconds),
        episodes=_episodes(metrics, told),
        warnings=warnings_of(metrics | share, first=began, accuracy=accuracy) | sealed.provenance.alarms,
        requests=sealed.provenance.requests,
        costs=sealed.provenance.costs,
    )


def _with_the_rest(seconds: dict[str, float]) -> dict[str, float]:
    """Name what no stage took. Of scoring counts what came after generation: the rest was done beside it."""
    stages = sum(seconds.get(name, 0.0) for name in STAGES.values())
    return {**seconds, "between": max(0.0, seconds["total"] - stages)}


def _episodes(metrics: Mapping[str, float], seconds: Mapping[str, float]) -> EpisodesReport | None:
    if "credit/turns_mean" not in metrics:
        return None
    ended = re.compile(r"credit/ended_(\w+)_fraction")
    return EpisodesReport(
        turns=metrics["credit/turns_mean"],
        calls=metrics["credit/calls_mean"],
        call_errors=metrics.get("credit/call_error_fraction"),
        endings={found[1]: share for name, share in metrics.items() if (found := ended.fullmatch(name))},
        answer_seconds=seconds["answering"],
        environment_seconds=seconds["environment"],
    )


def _cut(metrics: Mapping[str, float]) -> float | None:
    """None where no token was weighed, as in an iteration that learnt nothing."""
    if "update/importance_truncated" not in metrics:
        return None
    return metrics["update/importance_truncated"] + metrics["update/importance_masked"]


def evaluations_of(run: Run) -> list[Accuracy]:
    """Every evaluation of a run, in order."""
    temperature = evaluated_at(run)
    return [accuracy_of(summary, temperature=temperature) for summary in _evaluated(run)]


def evaluated_at(run: Run) -> float:
    """Temperature of a run's held-out evaluations."""
    return read_recorded(EvaluationConfig, run.record.config.get("evaluation", {})).temperature


def _evaluated(run: Run) -> list[Manifest]:
    keys = (StageKey.of(folder, "summary") for folder in run.folders() if folder.startswith("eval-"))
    return [summary for key in keys if (summary := run.find(key)) is not None]


def sealed_iterations(run: Run) -> list[Manifest]:
    """Manifests of the iterations that exist, in order; seals that are known already cost no look at the store."""
    numbers = iterations_among(run.folders())
    seals = (run.find(StageKey.of(iteration_key(number), "seal")) for number in numbers)
    return [sealed for sealed in seals if sealed is not None]


def run_costs(run: Run) -> dict[str, Cost]:
    """What the sealed iterations and the evaluations of a run took together, by role."""
    ended = [made.provenance.costs for made in (*sealed_iterations(run), *_evaluated(run))]
    roles = dict.fromkeys(role for costs in ended for role in costs)
    return {role: total(costs[role] for costs in ended if role in costs) for role in roles}


def reports_of(run: Run, *, term: str) -> list[IterationReport]:
    """Every sealed iteration of a run; `term` names the reward term that counts as accuracy."""
    seals = sealed_iterations(run)
    return [report_of(sealed, term=term, first=seals[0]) for sealed in seals]


def newest_reports(run: Run, number: int, *, most: int, term: str) -> list[IterationReport]:
    """The reports of an iteration and of at most so many in all that end with it; only seals are read."""
    keys = [StageKey.of(iteration_key(each), "seal") for each in (1, *range(max(1, number + 1 - most), number + 1))]
    first, *seals = [run.require(key) for key in keys]
    return [report_of(sealed, term=term, first=first) for sealed in seals]


def accuracy_of(summary: Manifest, *, temperature: float | None = None) -> Accuracy:
    """Read an evaluation's summary manifest."""
    mean, problems = summary.metrics["accuracy"], int(summary.metrics["problems"])
    low, high = mean_interval(mean * problems, summary.metrics["squares"], problems)
    passed = ((int(found[1]), share) for name, share in summary.metrics.items() if (found := _PASS_AT.fullmatch(name)))
    return Accuracy(
        number=StageKey.parse(summary.key).evaluation,
        problems=problems,
        mean=mean,
        low=low,
        high=high,
        samples=int(summary.metrics.get("samples", 1)),
        temperature=temperature,
        pass_at=dict(sorted(passed)),
    )
