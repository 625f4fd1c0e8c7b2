"""A run in numbers, read from its manifests."""

import re
from collections.abc import Mapping, Sequence
from datetime import timedelta

from pydantic import Field

from infra.config import Settings
from infra.costs import Cost, total
from infra.statistics import mean_interval
from infra.store.manifests import Manifest
from infra.store.runs import Run
from tasks.run.keys import StageKey, iteration_key, iterations_among
from tasks.views.diagnosis import WAITED, warnings_of

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
    pass_at: dict[int, float] = Field(default={}, exclude_if=lambda shares: not shares)
    """Share of problems that one of k completions solves, by k; none of one completion, or of a graded term."""

    @property
    def asked(self) -> str:
        """How many problems, and completions of each where these are several."""
        return f"{self.problems} problems" + (f" of {self.samples} samples" if self.samples > 1 else "")

    @property
    def passed(self) -> str:
        """The shares that k completions solve; nothing where there are none."""
        return "".join(f", pass@{k} {share:.3f}" for k, share in self.pass_at.items())

    def line(self) -> str:
        """The accuracy with its interval."""
        return f"{self.mean:.3f} (95% interval {self.low:.3f} to {self.high:.3f}, {self.asked}){self.passed}"


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
    length: float | None
    """Mean completion length in tokens."""
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
    """Digest of the weights after the update."""
    seconds: dict[str, float]
    """Seconds per stage, and in total."""
    weights_bytes: int
    """Weights that were moved to rollout engines, over all workers."""
    weights_seconds: float
    """Seconds that this took, summed over workers; with the start of a server where there was one."""
    episodes: EpisodesReport | None = None
    """What became of its episodes; none where no environment answers."""
    warnings: dict[str, str] = {}
    """What these numbers say is going wrong, by metric."""
    requests: dict[str, int] = {}
    """What the process that drives the run asked its store in a bucket between the seal before and this one, by verb;
    workers ask besides."""
    costs: dict[str, Cost] = {}
    """What it took, by role."""

    def line(self, total: int, remaining_seconds: float) -> str:
        """The report as one line of a terminal."""
        stages = "  ".join(f"{name} {self.seconds[name]:.1f}s" for name in ("rollout", "scoring", "update", "total"))
        eta = timedelta(seconds=round(remaining_seconds))
        note = "  QUARANTINED: NaN or Inf, weights unchanged" if self.quarantined else ""
        return (
            f"iteration {self.iteration:>3}/{total}  accuracy {shown(self.accuracy)}  reward {shown(self.reward)}  "
            f"length {shown(self.length, digits=1)}  kl {self.kl:.4f}  {stages}  eta {eta}{note}"
        )


def iteration_table(reports: Sequence[IterationReport]) -> list[dict[str, object]]:
    """Lay iterations out as rows. The UI shows some six columns before it scrolls: what people look for comes first."""
    return [
        {
            "iteration": report.iteration,
            "accuracy": shown(report.accuracy),
            "reward": shown(report.reward),
            "length": shown(report.length, digits=1),
            "kl": round(report.kl, 4),
            "mismatch": small(report.mismatch),
            "missing": report.missing,
            **({} if report.episodes is None else report.episodes.cells()),
            **{f"{name} seconds": round(value, 2) for name, value in report.seconds.items()},
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


def small(value: float | None) -> str:
    """A number whose magnitude is what counts, or a dash where there is none."""
    return "-" if value is None else f"{value:.1e}"


def report_of(sealed: Manifest, *, term: str) -> IterationReport:
    """Read an iteration's seal."""
    metrics, seconds = sealed.metrics, dict(sealed.provenance.seconds)
    compared = metrics.get("update/mismatch_tokens", 0) > 0
    told = {name: seconds.pop(name, 0.0) for name in ("environment", "answering", "generating")}
    share = {WAITED: told["environment"] / told["generating"]} if told["generating"] else {}
    return IterationReport(
        iteration=StageKey.parse(sealed.key).iteration,
        accuracy=metrics.get(f"credit/term_{term}_mean"),
        reward=metrics.get("credit/reward_mean"),
        length=metrics.get("credit/length_mean"),
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
        seconds=seconds,
        episodes=_episodes(metrics, told),
        warnings=warnings_of(metrics | share),
        requests=sealed.provenance.requests,
        costs=sealed.provenance.costs,
    )


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
    return [accuracy_of(summary) for summary in _evaluated(run)]


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
    return [report_of(sealed, term=term) for sealed in sealed_iterations(run)]


def newest_reports(run: Run, number: int, *, most: int, term: str) -> list[IterationReport]:
    """The reports of an iteration and of at most so many in all that end with it; only their seals are read."""
    seals = (StageKey.of(iteration_key(each), "seal") for each in range(max(1, number + 1 - most), number + 1))
    return [report_of(run.require(key), term=term) for key in seals]


def accuracy_of(summary: Manifest) -> Accuracy:
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
        pass_at=dict(sorted(passed)),
    )
