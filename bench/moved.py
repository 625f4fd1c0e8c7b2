"""Distance between a run that continues on other ranks and the same run on unchanged ranks.

The demo runs some iterations after a short warm-up. Then copies of it run more iterations, each on different ranks, and
their weights are compared with those of the unchanged copy. After one iteration only the order of sums differs. After
more iterations, completions that were sampled differently contribute too.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from bench.jobs import DEMO, FinishedJob, run_job_to_end
from bench.tables import Table
from rheostat.infra.store.bundles import fetch_bundle
from rheostat.infra.store.shards import read_shard
from rheostat.tasks.run.batch import rollouts_of
from rheostat.tasks.run.keys import StageKey

BEGUN, MORE = 4, 4
JOB = ("warmup.steps=300", "evaluation.problems=4", f"retention.keep_last={MORE + 2}")
MOVES = {
    "unchanged": (),
    "2 ranks": ("pools.update_ranks=2",),
    "2 ranks, ZeRO-2": ("pools.update_ranks=2", "update.zero_stage=2"),
    "3 ranks, ZeRO-3": ("pools.update_ranks=3", "update.zero_stage=3"),
    "2 threads": ("pools.threads=2",),
    "one worker, one controller": ("pools.workers=1", "controllers.count=1"),
}
Weights = dict[str, np.ndarray]


def measure() -> Iterator[Table]:
    """Measure how far weights differ if a run continues with other numbers of ranks, workers or threads.

    Yields a table of the distances after 1 and after 4 more iterations, as a share of the length of the updates.
    """
    with run_job_to_end(DEMO, [*JOB, f"iterations={BEGUN}"]) as start:
        store = Path(start.run.store.uri.removeprefix("file://")).parent
        before, stayed, rows = _weights(start, BEGUN), None, []
        for name, overrides in MOVES.items():
            arguments = [*JOB, f"iterations={BEGUN + MORE}", *overrides, "--accept-change"]
            with run_job_to_end(DEMO, arguments, initial_store=store) as job:
                after = [_weights(job, BEGUN + 1), _weights(job, BEGUN + MORE)]
                prompts = [_prompts(job, number) for number in range(1, BEGUN + MORE + 1)]
            stayed = stayed or (after, prompts)
            apart = [_length(one, other) / _length(other, before) for one, other in zip(after, stayed[0], strict=True)]
            rows.append((name, *(f"{share:.1e}" for share in apart), "yes" if prompts == stayed[1] else "NO"))
    yield Table(
        title=f"The demo after {BEGUN} iterations, continued on other ranks: distance of the weights from those of the "
        "unchanged run, as a share of the length of its updates",
        columns=("", "after 1 more", f"after {MORE} more", "same prompts in the same order"),
        rows=tuple(rows),
    )


def _weights(job: FinishedJob, number: int) -> Weights:
    ref = job.run.require(StageKey.policy(number)).bundles["weights"]
    return load_file(fetch_bundle(job.run.store, ref) / "model.safetensors")


def _prompts(job: FinishedJob, number: int) -> list[str]:
    tables = (read_shard(job.run.store, rollouts.shards[0]) for rollouts in rollouts_of(job.run, number))
    return [prompt for table in tables for prompt in table["prompt_id"].to_pylist()]


def _length(one: Weights, other: Weights) -> float:
    return math.sqrt(sum(float(np.square(one[name] - other[name]).sum()) for name in one))
