"""Peak memory of the process that runs the flows, at 1 and at 16 times the payload."""

import tempfile
from pathlib import Path

from infra.runs import Run
from tests.bench.inputs import write_inputs
from tests.bench.jobs import finished_job
from tests.bench.tables import Table

ANSWER_BYTES = 8 * 1024
"""Long reference answers, such as test suites, grow the payload without growing the computation."""
FACTORS = (1, 16)
ITERATIONS = 2


def measure() -> list[Table]:
    """Run the same job twice, with answers of different length."""
    rows: list[tuple[str, int, float, float]] = []
    for factor in FACTORS:
        with tempfile.TemporaryDirectory(prefix="rheostat-bench-") as name:
            inputs = write_inputs(Path(name), shape={}, answer_bytes=factor * ANSWER_BYTES)
            with finished_job(inputs.config, [f"iterations={ITERATIONS}"]) as job:
                payload = _payload_bytes(job.run)
        rows.append((f"{factor}x", ITERATIONS, payload / 2**20, job.controller_peak_bytes / 2**20))
    growth = rows[-1][3] / rows[0][3]
    return [
        Table(
            title="Peak memory of the controller",
            columns=("payload", "iterations", "MiB of shards", "controller's peak, MiB"),
            rows=tuple(rows),
            notes=(f"{rows[-1][2] / rows[0][2]:.1f} times the payload, {growth:.3f} times the controller's memory",),
        )
    ]


def _payload_bytes(run: Run) -> int:
    return sum({shard.digest: shard.bytes for m in run.manifests() for shard in m.shards}.values())
