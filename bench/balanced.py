"""Balanced initialization (arXiv 2509.00309): RL from a distilled policy and from its two-stage merge."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from bench.curves import CONFIGS, prepare_policy
from bench.jobs import DEMO, run_job_to_end
from bench.tables import Table
from rheostat.infra.store.runs import Run
from rheostat.tasks.run.keys import StageKey, iteration_key
from rheostat.tasks.views.metrics import evaluations_of

SEEDS = (0, 1, 2)
ITERATIONS = 20
FIRST = 5
"""Number of iterations at the start of training over which the table reports minima and means."""
PLOT = Path(__file__).parents[1] / "docs" / "pictures" / "balanced.svg"
DISTILLED, BALANCED = "distilled", "balanced"
SHARES: Mapping[str, float] = {"instruct": 0.25, "distilled": 0.25, "pretrained": 0.5}
"""Weights of the merged policies: θ = b (a instruct + (1 − a) distilled) + (1 − b) pretrained with a = b = 1/2."""
SHOWN: Mapping[str, str] = {
    "credit/length_mean": "completion length, tokens",
    "credit/reward_mean": "reward, share of correct completions",
    "update/kl": "KL to the initial policy, nats per token",
}


@dataclass(frozen=True, slots=True)
class ReinforcedRun:
    """Metrics per iteration of one RL run, and its accuracy on held-out problems before and after training."""

    numbers: Mapping[str, tuple[float, ...]]
    """Values of each metric in every iteration of the run, by the name of the metric."""
    before: float
    """Accuracy of the initial policy on held-out problems with greedy sampling, before training."""
    after: float


def measure() -> Iterator[Table]:
    """Train with RL from the distilled and from the merged policy on every seed.

    Yield a table of rewards, lengths and KL per run, and write the plot docs/pictures/balanced.svg.
    """
    runs: dict[str, list[ReinforcedRun]] = {DISTILLED: [], BALANCED: []}
    for seed in SEEDS:
        with ExitStack() as stack:
            parents = _parents(stack, seed)
            sums = ", ".join(f'{{path="{parents[name]}", weight={share}}}' for name, share in SHARES.items())
            starts = {
                DISTILLED: f'policy={{kind="directory", path="{parents["distilled"]}"}}',
                BALANCED: f'policy={{kind="merge", allow_unrelated=true, parents=[{sums}]}}',
            }
            for name, policy in starts.items():
                runs[name].append(_reinforced(policy, seed))
                sys.stderr.write(f"seed {seed}  {name}: {runs[name][-1].before:.3f} to {runs[name][-1].after:.3f}\n")
    _draw(runs)
    yield _table(runs)


def _parents(stack: ExitStack, seed: int) -> dict[str, Path]:
    """Train the three policies that are merged, and return their directories by name.

    "pretrained" is the demo's policy after warm-up on answers with and without worked steps. "instruct" is "pretrained"
    after more training on answers without steps. "distilled" is "pretrained" after distillation from a teacher that
    always shows the steps. The jobs' stores exist until `stack` is closed.
    """
    pretrained = stack.enter_context(prepare_policy(seed))
    start = (f"seed={seed}", f'policy={{kind="directory", path="{pretrained}"}}')
    bare = ("iterations=0", "warmup.steps=200", "warmup.learning_rate=1e-3", "warmup.worked_answer_fraction=0")
    teacher = stack.enter_context(prepare_policy(seed, "warmup.worked_answer_fraction=1"))
    distillation = ("warmup=", f"algorithm.distillation.teacher.path={teacher}", "iterations=12")
    instruct = stack.enter_context(run_job_to_end(DEMO, (*start, *bare)))
    distilled = stack.enter_context(run_job_to_end(CONFIGS / "distill.toml", (*start, *distillation)))
    return {
        "pretrained": pretrained,
        "instruct": _policy_of(instruct.run, 0),
        "distilled": _policy_of(distilled.run, 12),
    }


def _policy_of(run: Run, iterations: int) -> Path:
    weights = run.require(StageKey.policy(iterations)).bundles["weights"]
    return Path(run.store.local_path(f"{weights.key}/config.json")).parent


def _reinforced(policy: str, seed: int) -> ReinforcedRun:
    settings = ("warmup=", "update.kl.kind=k3", "update.kl.coefficient=1e-3", f"iterations={ITERATIONS}")
    with run_job_to_end(DEMO, (f"seed={seed}", policy, *settings)) as job:
        seals = [job.run.require(f"{iteration_key(number)}/seal") for number in range(1, ITERATIONS + 1)]
        evaluations = evaluations_of(job.run)
    return ReinforcedRun(
        numbers={name: tuple(seal.metrics[name] for seal in seals) for name in SHOWN},
        before=evaluations[0].mean,
        after=evaluations[-1].mean,
    )


def _table(runs: Mapping[str, Sequence[ReinforcedRun]]) -> Table:
    rows: list[tuple[str | float, ...]] = []
    for start, each in runs.items():
        for seed, run in zip(SEEDS, each, strict=True):
            reward, length = run.numbers["credit/reward_mean"], run.numbers["credit/length_mean"]
            kl = run.numbers["update/kl"]
            rows.append(
                (
                    f"{start}, seed {seed}",
                    run.before,
                    reward[0],
                    min(reward[1:FIRST]),
                    reward[-1],
                    length[0],
                    min(length[1:FIRST]),
                    length[-1],
                    fmean(kl[:FIRST]),
                    kl[-1],
                    run.after,
                )
            )
    lowest = f"lowest of 2 to {FIRST}"
    return Table(
        title=f"RL from a distilled policy and from the balanced merge, {ITERATIONS} iterations",
        columns=(
            "",
            "held out before",
            "reward 1",
            lowest,
            f"reward {ITERATIONS}",
            "length 1",
            f"{lowest} ",
            f"length {ITERATIONS}",
            f"KL, first {FIRST}",
            f"KL {ITERATIONS}",
            "held out after",
        ),
        rows=tuple(rows),
        notes=(
            "held out: share of 256 problems answered correctly, greedy; all other columns are from sampled rollouts",
        ),
    )


def _draw(runs: Mapping[str, Sequence[ReinforcedRun]]) -> None:
    """Plot one panel per metric over the iterations: each seed as a thin line, and the mean over seeds as a thick line.

    `runs` contains one run per seed for each initial policy.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.5), layout="constrained")
    for axes, (metric, label) in zip(figure.subplots(1, len(SHOWN)), SHOWN.items(), strict=True):
        for place, (start, each) in enumerate(runs.items()):
            lines = [run.numbers[metric] for run in each]
            numbers, color = range(1, ITERATIONS + 1), f"C{place}"
            for line in lines:
                axes.plot(numbers, line, color=color, alpha=0.35, linewidth=0.8)
            axes.plot(numbers, [fmean(column) for column in zip(*lines, strict=True)], color=color, label=start)
        axes.set(xlabel="iteration", ylabel=label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(PLOT, metadata={"Date": None})
