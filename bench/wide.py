"""CPU time of the driver and Prefect's server for an iteration of many shards: 4,096 prompts in 128 shards."""

import statistics
from itertools import pairwise
from pathlib import Path

import psutil

from bench.jobs import DEMO, run_job_to_end
from bench.processes import cpu_seconds
from bench.tables import Table
from rheostat.tasks.run.keys import iteration_key

PROMPTS, SHARD_PROMPTS, ITERATIONS = 4096, 32, 4
WIDE = (
    "warmup.steps=1",
    f"iterations={ITERATIONS}",
    "evaluation.problems=8",
    f"rollout.prompts={PROMPTS}",
    f"rollout.shard_prompts={SHARD_PROMPTS}",
    "rollout.group_size=2",
    "rollout.sampling.max_new_tokens=4",
)


def measure() -> list[Table]:
    """Measure the CPU seconds per iteration of the driver and of Prefect's server, for iterations with 128 shards.

    Returns a table of the medians over iterations. Completions are only 4 tokens long.
    """
    sealed: list[tuple[float, float]] = []

    def look(driver: int, run: Path) -> None:
        if (run / f"manifests/{iteration_key(len(sealed) + 1)}/seal.json").exists():
            sealed.append((cpu_seconds(driver), sum(cpu_seconds(server.pid) for server in list_servers(driver))))

    with run_job_to_end(DEMO, WIDE, on_poll=look):
        pass
    spent = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(sealed)]
    return [
        Table(
            title=f"CPU of an iteration of {PROMPTS:,} prompts in {PROMPTS // SHARD_PROMPTS} shards",
            columns=("", "CPU s"),
            rows=(
                ("driver", statistics.median(driver for driver, _ in spent)),
                ("Prefect's server", statistics.median(server for _, server in spent)),
            ),
            notes=(f"medians of iterations 2 to {ITERATIONS}",),
        )
    ]


def list_servers(driver: int) -> list[psutil.Process]:
    """Return the Prefect server processes that a driver has started. `driver` is the driver's process ID."""
    return [
        child for child in psutil.Process(driver).children() if "rheostat.flows.cli.server" in " ".join(child.cmdline())
    ]
