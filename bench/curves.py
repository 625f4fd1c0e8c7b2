"""Learning curves of the algorithms on the demo's problems, with the same start and budget on three seeds."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from bench.jobs import DEMO, run_job_to_end
from bench.tables import Table
from rheostat.tasks.run.keys import StageKey
from rheostat.tasks.views.metrics import evaluations_of, reports_of

SEEDS = (0, 1, 2)
MORE_SEEDS = (3, 4)
"""Additional seeds for the two algorithms (GRPO and CAPO) that are compared seed by seed."""
PLOT = Path(__file__).parents[1] / "docs" / "algorithms.png"
CONFIGS = DEMO.parent
TEACHER = "warmup.worked_answer_fraction=1"
"""Override with which the warmed-up policy is a teacher, which solves nearly all problems."""
COLORS = 10
"""Number of colors in matplotlib's color cycle. Curves after this number reuse the colors with dashed lines."""
SHADED = 4
"""Largest number of recipes for which a plot shades the range over seeds."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Configuration file of a training job, with overrides such as `algorithm.kind=grpo`.

    In overrides, `{teacher}` is replaced by the directory of a policy that was trained on worked answers only.
    """

    overrides: tuple[str, ...]
    config: Path = DEMO


GRPO, CAPO = "GRPO", "CAPO with a step checker"
RECIPES: Mapping[str, Recipe] = {
    GRPO: Recipe(("algorithm.kind=grpo",)),
    "Dr. GRPO": Recipe(
        (
            "algorithm.kind=dr_grpo",
            "update.loss.kind=ppo_clip",
            "update.loss.aggregation.kind=constant",
            "update.loss.aggregation.length=32",
        )
    ),
    "RLOO": Recipe(("algorithm.kind=rloo",)),
    "REINFORCE++": Recipe(("algorithm.kind=reinforce_pp", "algorithm.kl.coefficient=1e-3")),
    "REINFORCE++-baseline": Recipe(("algorithm.kind=reinforce_pp_baseline",)),
    "PPO with a critic": Recipe(
        (
            "algorithm.kind=ppo",
            "algorithm.lam=1",
            "algorithm.critic.learning_rate=2e-3",
            "algorithm.critic.warmup_iterations=1",
        )
    ),
    CAPO: Recipe((), CONFIGS / "demos/capo/job.toml"),
    "GRPO, GSPO's loss": Recipe(("update.loss.kind=gspo", "update.loss.clip_low=0.05", "update.loss.clip_high=0.05")),
    "GRPO, CISPO's loss": Recipe(("update.loss.kind=cispo",)),
    "GRPO, adaptive KL": Recipe(
        (
            "update.kl.kind=k3",
            "update.kl.coefficient=1e-2",
            "update.kl.adaptive.target=0.3",
            "update.kl.adaptive.horizon=5000",
        )
    ),
    "GRPO, LoRA of rank 8": Recipe(("update.lora.rank=8", "update.lora.alpha=16", "update.learning_rate=5e-3")),
    "distillation": Recipe(
        ("algorithm.distillation.teacher.path={teacher}", "rollout.prompts=512", "rollout.shard_prompts=256"),
        CONFIGS / "distill.toml",
    ),
}


@dataclass(frozen=True, slots=True)
class Curve:
    """Learning curve of one run, as shares of problems that the policy solved during and after training."""

    rollouts: tuple[float, ...]
    """Share of correct completions among the sampled rollouts of each iteration."""
    before: float
    """Share of held-out problems that the policy solves with greedy sampling before training."""
    after: float


def measure() -> Iterator[Table]:
    """Train every recipe on every seed and plot the learning curves in docs/algorithms.png.

    Yield a table of all recipes, and a table that compares GRPO and CAPO on more seeds.
    """
    curves: dict[str, list[Curve]] = {name: [] for name in RECIPES}
    for seed in (*SEEDS, *MORE_SEEDS):
        with prepare_policy(seed) as start, prepare_policy(seed, TEACHER) as teacher:
            for name in RECIPES if seed in SEEDS else (GRPO, CAPO):
                curves[name].append(train_curve(start, seed, RECIPES[name], teacher=teacher))
                sys.stderr.write(f"seed {seed}  {name}: {curves[name][-1].after:.3f}\n")
    shown_curves = {name: runs[: len(SEEDS)] for name, runs in curves.items()}
    draw(shown_curves, PLOT)
    yield table(f"Learning on the demo's problems, {len(SEEDS)} seeds", shown_curves)
    yield pairs_table(curves[GRPO], curves[CAPO])


def train_curves(recipes: Mapping[str, Recipe], plot: Path | None) -> dict[str, list[Curve]]:
    """Train every recipe on three seeds from the warmed-up policy, plot the learning curves in the file `plot` if it is
    given, and return them by recipe."""
    curves: dict[str, list[Curve]] = {name: [] for name in recipes}
    has_teacher = any("{teacher}" in override for recipe in recipes.values() for override in recipe.overrides)
    for seed in SEEDS:
        with ExitStack() as policies:
            start = policies.enter_context(prepare_policy(seed))
            teacher = policies.enter_context(prepare_policy(seed, TEACHER)) if has_teacher else start
            for name, recipe in recipes.items():
                curves[name].append(train_curve(start, seed, recipe, teacher=teacher))
                sys.stderr.write(f"seed {seed}  {name}: {curves[name][-1].after:.3f}\n")
    if plot is not None:
        draw(curves, plot)
    return curves


@contextmanager
def prepare_policy(seed: int, *overrides: str):
    """Warm up the demo's policy by supervised training, and yield the policy's directory for the block.

    `overrides` change the demo's configuration. No reinforcement learning is done.
    """
    with run_job_to_end(DEMO, (f"seed={seed}", "iterations=0", *overrides)) as job:
        manifest = job.run.find(StageKey.policy(0))
        assert manifest is not None
        yield Path(job.run.store.local_path(f"{manifest.bundles['weights'].key}/config.json")).parent


def train_curve(start: Path, seed: int, recipe: Recipe, *, teacher: Path) -> Curve:
    """Train a recipe from the warmed-up policy in the directory `start`, and return the learning curve."""
    begun = ("warmup=", "policy.kind=directory", f"policy.path={start}", f"seed={seed}")
    overrides = tuple(override.replace("{teacher}", str(teacher)) for override in recipe.overrides)
    return run_curve(recipe.config, (*begun, *overrides))


def run_curve(config: Path, overrides: Sequence[str], *, term: str = "numeric") -> Curve:
    """Run a training job to its end, and return its learning curve. `term` names the reward of correct completions."""
    with run_job_to_end(config, overrides) as job:
        evaluations = evaluations_of(job.run)
        reports = reports_of(job.run, term=term)
    return Curve(
        rollouts=tuple(report.accuracy or 0.0 for report in reports),
        before=evaluations[0].mean,
        after=evaluations[-1].mean,
    )


def table(title: str, curves: Mapping[str, Sequence[Curve]]) -> Table:
    """Build a table of the solved shares before, during and after training, with one row per recipe.

    The values are means over seeds. The last column is the range over seeds.
    """
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
            "before, after: held-out problems, greedy decoding; half-way, last, mean: sampled rollouts of these "
            "iterations",
        ),
    )


def pairs_table(grpo: Sequence[Curve], capo: Sequence[Curve]) -> Table:
    """Build a table that compares GRPO and CAPO seed by seed.

    On each seed both algorithms have the same initial policy, prompts and training budget.
    """
    rows = [
        (f"seed {seed}", fmean(a.rollouts), fmean(b.rollouts), a.after, b.after)
        for seed, a, b in zip((*SEEDS, *MORE_SEEDS), grpo, capo, strict=True)
    ]
    gains = [row[2] - row[1] for row in rows]
    error = stdev(gains) / len(gains) ** 0.5
    return Table(
        title="CAPO compared with GRPO",
        columns=("", "GRPO, mean", "CAPO, mean", "GRPO, after", "CAPO, after"),
        rows=(*rows, ("mean", *(fmean(row[i] for row in rows) for i in range(1, 5)))),
        notes=(f"CAPO's mean over training minus GRPO's: {fmean(gains):+.4f}, standard error {error:.4f} over seeds",),
    )


def draw(curves: Mapping[str, Sequence[Curve]], path: Path) -> None:
    """Plot each recipe's share of correct rollouts over the iterations, and save the plot to `path`.

    A line shows the mean over seeds. With few recipes, a lighter area shows the range over seeds; areas of many recipes
    would cover each other.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for place, (name, runs) in enumerate(curves.items()):
        columns = list(zip(*(run.rollouts for run in runs), strict=True))
        numbers = range(1, len(columns) + 1)
        color, style = f"C{place % COLORS}", "-" if place < COLORS else "--"
        axes.plot(numbers, [fmean(column) for column in columns], color=color, linestyle=style, label=name)
        if len(curves) <= SHADED:
            axes.fill_between(numbers, [min(c) for c in columns], [max(c) for c in columns], color=color, alpha=0.1)
    axes.set(xlabel="iteration", ylabel="share of correct rollouts", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120, metadata={"Software": None})
