"""Share of orchestration and data movement in an iteration that takes about a minute."""

from bench.cycles import read_cycles
from bench.jobs import DEMO, run_job_to_end
from bench.tables import Table

# Four times the demo's width, more layers and longer completions. One iteration is enough, because it is long.
LONG = (
    "warmup.steps=1",
    "iterations=1",
    "evaluation.problems=32",
    "policy.hidden_size=128",
    "policy.intermediate_size=384",
    "policy.layers=6",
    "policy.context=256",
    "rollout.prompts=128",
    "rollout.sampling.max_new_tokens=160",
    "algorithm.keep_uninformative=true",
)


def measure() -> list[Table]:
    """Run one long iteration. Return a table of the seconds of each stage, of orchestration and of data movement."""
    with run_job_to_end(DEMO, LONG) as job:
        (cycle,) = read_cycles(job.run)
    return [
        Table(
            title="Share of orchestration and data plane in one long iteration, measured",
            columns=("", "seconds", "% of the iteration"),
            rows=tuple(
                (name, seconds, 100 * seconds / cycle.seconds)
                for name, seconds in (
                    *cycle.stages.items(),
                    ("orchestration", cycle.orchestration),
                    ("data plane, a part of the stages", cycle.data),
                    ("orchestration and data plane", cycle.overhead),
                    ("whole iteration", cycle.seconds),
                )
            ),
            notes=("rollout and scoring overlap", "the target is 2% for orchestration and data plane"),
        )
    ]
