"""Controllers in processes of their own: the job of the part `controllers`, by deployments and a real worker."""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from bench.controllers import HITS, NOTES, PAYLOADS, SAMPLES, Measured, Place, environment, hits, peak, ratio, run_job
from bench.tables import Table
from tests.support.jobs import AUTH, PASSWORD, ROOT, kill, prefect_server, wait_for

DEPLOYED = (8,)
ITERATIONS = 1
PREFECT = str(Path(sys.executable).with_name("prefect"))


def measure() -> list[Table]:
    """Run the job with more and more controllers, each time with little payload and with much."""
    with tempfile.TemporaryDirectory(prefix="rheostat-bench-") as home, _deployments(Path(home)) as place:
        runs = [
            run_job(place, controllers, payload, iterations=ITERATIONS)
            for controllers in DEPLOYED
            for payload in PAYLOADS
        ]
    return [_table(runs)]


@contextmanager
def _deployments(home: Path) -> Iterator[Place]:
    """Serve Prefect, deploy prefect.yaml there, and start a worker, as docs/deployments.md says."""
    with prefect_server(home) as api:
        environ = {"PREFECT_API_URL": api, **AUTH, "PREFECT_WORKER_QUERY_SECONDS": "1", "RHEOSTAT_HOME": str(home)}
        place = Place(home, environ)
        pool = {"name": "rheostat", "type": "process"}
        httpx.post(f"{api}/work_pools/", json=pool, auth=PASSWORD, timeout=60).raise_for_status()
        command = [PREFECT, "--no-prompt", "deploy", "--all"]
        subprocess.run(command, cwd=ROOT, env=environment(place), stdout=subprocess.DEVNULL, check=True)
        command = [PREFECT, "worker", "start", "--pool", "rheostat"]
        worker = subprocess.Popen(command, cwd=home, env=environment(place), stdout=subprocess.DEVNULL)
        try:
            yield Place(home, place.environment, worker.pid)
        finally:
            below = psutil.Process(worker.pid).children(recursive=True)
            worker.terminate()
            wait_for(lambda: worker.poll() is not None, seconds=30)
            for process in below:
                if process.is_running():
                    process.kill()
            kill(worker)


def _table(runs: Sequence[Measured]) -> Table:
    return Table(
        title=f"Controllers as deployments: {ITERATIONS} iteration of {SAMPLES} samples in 8 shards",
        columns=(
            "controllers",
            "KiB per sample",
            "processes",
            "largest peak, MiB",
            "ratio",
            "driver's peak, MiB",
            "driver's ratio",
            *HITS,
            "CPU s per process",
        ),
        rows=tuple(
            (
                str(run.controllers),
                run.payload_bytes // 1024,
                len(run.of("controller")),
                peak(run.of("controller")),
                ratio(run, runs, "controller"),
                peak(run.of("driver")),
                ratio(run, runs, "driver"),
                *hits(run),
                statistics.median(process.cpu_seconds for process in run.of("controller")),
            )
            for run in runs
        ),
        notes=NOTES,
    )
