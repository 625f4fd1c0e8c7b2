"""Learning curves of the algorithms on the demo's problems: the same warmed-up policy, the same budget, three seeds."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from tasks.plan import policy_key
from tasks.reports import evaluations_of, reports_of
from tests.bench.jobs import DEMO, finished_job
from tests.bench.tables import Table

SEEDS = (0, 1, 2)
PLOT = Path(__file__).parents[2] / "docs" / "algorithms.png"
GRPO = "GRPO"
CRITIC = ("algorithm.critic.learning_rate=2e-3", "algorithm.critic.warmup_iterations=1")
RECIPES: Mapping[str, tuple[str, ...]] = {
    GRPO: ("algorithm.kind=grpo",),
    "Dr. GRPO": (
        "algorithm.kind=dr_grpo",
        "update.loss.kind=ppo_clip",
        "update.loss.aggregation.kind=constant",
        "update.loss.aggregation.length=32",
    ),
    "RLOO": ("algorithm.kind=rloo",),
    "REINFORCE++": ("algorithm.kind=reinforce_pp", "algorithm.kl.coefficient=1e-3"),
    "REINFORCE++-baseline": ("algorithm.kind=reinforce_pp_baseline",),
    "PPO with a critic": ("algorithm.kind=ppo", "algorithm.lam=1", *CRITIC),
    "GRPO, GSPO's loss": (
        "algorithm.kind=grpo",
        "update.loss.kind=gspo",
        "update.loss.clip_low=0.05",
        "update.loss.clip_high=0.05",
    ),
    "GRPO, CISPO's loss": ("algorithm.kind=grpo", "update.loss.kind=cispo"),
    "GRPO, adaptive KL": (
        "algorithm.kind=grpo",
        "update.kl.kind=k3",
        "update.kl.coefficient=1e-2",
        "update.kl.adaptive.target=0.3",
        "update.kl.adaptive.horizon=5000",
    ),
    "GRPO, LoRA of rank 8": ("algorithm.kind=grpo", "update.lora.rank=8", "update.learning_rate=3e-3"),
}


@dataclass(frozen=True, slots=True)
class Curve:
    """One run: shares of problems solved."""

    rollouts: tuple[float, ...]
    """Of each iteration's completions."""
    before: float
    """Held out, greedy."""
    after: float


def measure() -> Iterator[Table]:
    """Every recipe on every seed, and the plot in docs/."""
    curves: dict[str, list[Curve]] = {name: [] for name in RECIPES}
    for seed in SEEDS:
        with warmed_up(seed) as start:
            for name, overrides in RECIPES.items():
                curves[name].append(curve(start, seed, overrides))
                sys.stderr.write(f"seed {seed}  {name}: {curves[name][-1].after:.3f}\n")
    draw(curves, PLOT)
    yield table(f"Learning on configs/demo.toml, {len(SEEDS)} seeds", curves)


@contextmanager
def warmed_up(seed: int, *overrides: str):
    """The directory of the demo's policy after its warm-up, before any reinforcement."""
    with finished_job(DEMO, (f"seed={seed}", "iterations=0", *overrides)) as job:
        made = job.run.find(policy_key(0))
        assert made is not None
        yield Path(job.run.store.local(f"{made.bundles['weights'].key}/config.json")).parent


def curve(start: Path, seed: int, overrides: Sequence[str]) -> Curve:
    """Train from a warmed-up policy."""
    begun = ("warmup=", "policy.kind=directory", f"policy.path={start}", f"seed={seed}")
    with finished_job(DEMO, (*begun, *overrides)) as job:
        evaluations = evaluations_of(job.run)
        reports = reports_of(job.run, term="numeric")
    return Curve(
        rollouts=tuple(report.accuracy or 0.0 for report in reports),
        before=evaluations[0].mean,
        after=evaluations[-1].mean,
    )


def table(title: str, curves: Mapping[str, Sequence[Curve]]) -> Table:
    """One row per recipe; ranges are over seeds."""
    rows = []
    for name, runs in curves.items():
        after = [run.after for run in runs]
        area = [fmean(run.rollouts) for run in runs]
        half = len(runs[0].rollouts) // 2
        rows.append(
            (
                name,
                fmean(run.before for run in runs),
                fmean(run.rollouts[half - 1] for run in runs),
                fmean(run.rollouts[-1] for run in runs),
                fmean(area),
                fmean(after),
                f"{min(after):.3f} to {max(after):.3f}",
            )
        )
    return Table(
        title=title,
        columns=("", "before", "half-way", "last", "mean", "after", "after, over seeds"),
        rows=tuple(rows),
        notes=(
            "before and after: held-out problems, greedy; half-way, last, mean: rollouts of those iterations, sampled",
        ),
    )


def draw(curves: Mapping[str, Sequence[Curve]], path: Path) -> None:
    """Plot the mean over seeds of each recipe's rollouts, with the range in a lighter shade."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for name, runs in curves.items():
        columns = list(zip(*(run.rollouts for run in runs), strict=True))
        numbers = range(1, len(columns) + 1)
        (line,) = axes.plot(numbers, [fmean(column) for column in columns], label=name)
        axes.fill_between(
            numbers, [min(c) for c in columns], [max(c) for c in columns], color=line.get_color(), alpha=0.08
        )
    axes.set(xlabel="iteration", ylabel="share of rollouts that are right", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120, metadata={"Software": None})
