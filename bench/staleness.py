"""Time saved by overlapping iterations, and cost of training on rollouts of older policies.

The time is measured with a job whose rollouts take as long as its updates. Its engine is paced: it sleeps, so that
rollouts and updates do not share the cores, at the pace of the job's own updates, which a first run measures. All runs
have the same placement, with separate machines for the update. The cost is visible in learning curves.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from bench.curves import SEEDS, Recipe, table, train_curves
from bench.cycles import Cycle, read_cycles
from bench.jobs import DEMO, run_job_to_end
from bench.tables import Table

TOKENS = 60
JOB = (
    "warmup.steps=1",
    "evaluation.problems=4",
    "policy.hidden_size=128",
    "policy.intermediate_size=384",
    "policy.layers=4",
    "policy.context=128",
    "rollout.prompts=32",
    "rollout.shard_prompts=16",
    f"rollout.sampling.max_new_tokens={TOKENS}",
    "algorithm.keep_uninformative=true",
    "retention.keep_last=4",
    "controllers.count=1",
    "placement.kind=colocated",
    "pools.workers=2",
    "pools.dedicated_update_resources=true",
)
SETTLED = 2
"""Number of iterations at the start that are left out of the results.

They include starting processes, and have no earlier iteration to overlap with.
"""


RECIPES = {
    f"rollout.staleness={staleness}": Recipe((f"rollout.staleness={staleness}", f"retention.keep_last={staleness + 2}"))
    for staleness in (0, 1, 2, 4)
}
PLOT = Path(__file__).parents[1] / "docs" / "staleness.png"


def measure() -> Iterator[Table]:
    """Measure the time saved by overlapping iterations, and the effect of older rollouts on learning.

    Yields a table of times, and a table of learning curves for each value of `rollout.staleness` on three seeds. The
    curves are plotted in docs/staleness.png.
    """
    yield gain()
    yield table(f"Learning on the demo's problems, {len(SEEDS)} seeds", train_curves(RECIPES, PLOT))


def gain() -> Table:
    """Measure the seconds per iteration with and without overlapping iterations, and return them as a table.

    Rollouts sleep as long as an update takes, which a first run measures. Each variant runs twice.
    """
    update = median(cycle.stages["update"] for cycle in _cycles(0.0, iterations=4, staleness=0))
    seconds: dict[int, list[float]] = {0: [], 1: []}
    cycles: dict[int, list[Cycle]] = {0: [], 1: []}
    for staleness in (0, 1, 1, 0):  # a machine that becomes slower affects both
        found = _cycles(update / TOKENS, iterations=8, staleness=staleness)
        cycles[staleness] += found
        seconds[staleness].append(sum(cycle.seconds for cycle in found) / len(found))
    rows = [
        (
            f"rollout.staleness={staleness}",
            median(cycle.stages["rollout"] for cycle in cycles[staleness]),
            median(cycle.stages["update"] for cycle in cycles[staleness]),
            sum(seconds[staleness]) / 2,
            sum(seconds[staleness]) / sum(seconds[0]),
        )
        for staleness in (0, 1)
    ]
    return Table(
        title="Overlapping iterations, with rollouts as long as updates",
        columns=("", "rollout, s", "update, s", "iteration, s", "ratio"),
        rows=tuple(rows),
        notes=("seconds of an iteration are means over two runs, from the third iteration on", "the target is 0.6"),
    )


def _cycles(base_seconds: float, *, iterations: int, staleness: int) -> Sequence[Cycle]:
    """Run the job and return the time breakdown of its iterations, without the first ones.

    `base_seconds` is the time that the engine sleeps per decoding step.
    """
    options = f"{{base_seconds={base_seconds},per_sequence_seconds=0,sigma=0,median_tokens={TOKENS}}}"
    engine = f'rollout.engine={{kind="target",target="bench.paced:PacedEngine",options={options}}}'
    sys.stderr.write(f"--- rollout.staleness={staleness}, {base_seconds * TOKENS:.1f} s per rollout\n")
    with run_job_to_end(DEMO, (*JOB, engine, f"iterations={iterations}", f"rollout.staleness={staleness}")) as job:
        return read_cycles(job.run)[SETTLED:]
