"""Seconds per stage of the demo's iterations, and the remaining time of orchestration and data."""

from bench.cycles import median_cycle, read_cycles
from bench.jobs import DEMO, run_job_to_end
from bench.tables import Table

ITERATIONS = 10
SETTLED = 2
"""Number of iterations at the start that are left out of the results.

They include starting worker pools and loading weights.
"""
QUICK = ("warmup.steps=300", f"iterations={ITERATIONS}")
TARGET_SECONDS = 60


def measure() -> list[Table]:
    """Run the demo job.

    Return a table of the median seconds per stage, and a table of orchestration and data movement.
    """
    with run_job_to_end(DEMO, QUICK) as job:
        cycles = read_cycles(job.run)[SETTLED:]
    cycle = median_cycle(cycles)
    stages = Table(
        title=f"Seconds per stage: configs/demo.toml, median of iterations {SETTLED + 1} to {ITERATIONS}",
        columns=("stage", "seconds"),
        rows=(
            *cycle.stages.items(),
            ("orchestration", cycle.orchestration),
            ("whole iteration", cycle.seconds),
        ),
        notes=("a stage counts the seconds of its slowest worker", f"whole job {job.seconds:.0f} s"),
    )
    overhead = Table(
        title="Orchestration and data plane",
        columns=("", "seconds per iteration", f"% of {TARGET_SECONDS} s"),
        rows=tuple(
            (name, seconds, 100 * seconds / TARGET_SECONDS)
            for name, seconds in (
                ("orchestration (no worker is busy)", cycle.orchestration),
                ("data plane (load weights, write shards and weights)", cycle.data),
                ("together", cycle.overhead),
            )
        ),
        notes=("the target is 2% of an iteration of 60 s; the part `minute` measures an iteration of that length",),
    )
    return [stages, overhead]
