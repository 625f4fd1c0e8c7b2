"""Controllers in separate processes: the job of the benchmark `controllers` with Prefect deployments.

A real Prefect worker starts the controllers. A second job of several iterations measures the cost of an iteration apart
from its workers, with sub-flows and with deployments.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from bench.controllers import (
    HITS,
    NOTES,
    PAYLOADS,
    SAMPLES,
    BenchPlace,
    ControllerCosts,
    count_hits,
    list_processes,
    peak_mebibytes,
    process_environment,
    ratio,
    run_job,
)
from bench.inputs import write_inputs
from bench.processes import measure_processes
from bench.processes import wait_for as wait_for_file
from bench.tables import Table
from tests.support.jobs import AUTH, PASSWORD, RHEOSTAT, ROOT, kill, prefect_server, wait_for

DEPLOYED = (8,)
ITERATIONS = 1
ITERATIONS_OF_COST, PAIRS = 8, 2
PREFECT = str(Path(sys.executable).with_name("prefect"))


def measure() -> list[Table]:
    """Measure controllers that a Prefect worker starts in separate processes.

    Returns a table of their peak memory with small and large payloads, and a table of the CPU seconds per iteration.
    """
    with tempfile.TemporaryDirectory(prefix="rheostat-bench-") as home, _deployments(Path(home)) as place:
        runs = [
            run_job(place, controllers, payload, iterations=ITERATIONS)
            for controllers in DEPLOYED
            for payload in PAYLOADS
        ]
        costs = [_cost(place, where) for _ in range(PAIRS) for where in ("nested", "deployment")]
    return [_table(runs), _costs(costs)]


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU and wall-clock seconds of a job from the plan of its first iteration to the end of its last iteration."""

    where: str
    flow_runs: int
    """Number of controller processes that ran during the job."""
    cpu_seconds: Mapping[str, float]
    """CPU seconds by kind of process: "driver", "server", "Prefect's worker" and "controller"."""
    seconds: float


def _cost(place: BenchPlace, where: str) -> Cost:
    """Run a job and sum up the CPU seconds of its processes except the workers.

    `where` is the value of the setting `controllers.where`: "nested" (in the driver) or "deployment".
    """
    sys.stderr.write(f"{ITERATIONS_OF_COST} iterations, {where}\n")
    with tempfile.TemporaryDirectory(prefix="rheostat-bench-") as name:
        directory = Path(name)
        inputs = write_inputs(directory, shape={}, max_new_tokens=16)
        overrides = [f"iterations={ITERATIONS_OF_COST}", f"controllers.where={where}"]
        command = [RHEOSTAT, "train", str(inputs.config), *overrides, "--run", "bench", "--store", name]
        manifests = directory / "bench" / "manifests"
        driver = subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr, env=process_environment(place))
        try:
            with measure_processes(lambda: _flow_processes(driver.pid, place)) as watched:
                wait_for_file(manifests / "it-0001/plan.json", lambda: driver.poll() is not None)
                began = time.monotonic()
                before = {pid: process.cpu_seconds for pid, process in watched.items()}
                wait_for_file(manifests / f"it-{ITERATIONS_OF_COST:04d}/seal.json", lambda: driver.poll() is not None)
                seconds = time.monotonic() - began
                used = Counter[str]()
                for pid, process in watched.items():
                    used[process.kind] += process.cpu_seconds - before.get(pid, 0.0)
                driver.wait()
        finally:
            kill(driver)
    return Cost(where, sum(process.kind == "controller" for process in watched.values()), used, seconds)


def _flow_processes(driver: int, place: BenchPlace) -> dict[int, str]:
    """Return the processes of a job that run flows, by process ID, with their kinds.

    The kinds are "driver", "controller", "server" (of Prefect) and "Prefect's worker". `driver` is the driver's process
    ID.
    """
    assert place.worker is not None
    processes = {pid: kind for pid, kind in list_processes(driver, place).items() if kind != "worker"}
    served = {
        child.pid: "server" for child in psutil.Process().children() if "rheostat.flows.cli.server" in child.cmdline()
    }
    return {**processes, **served, place.worker: "Prefect's worker"}


def _costs(costs: Sequence[Cost]) -> Table:
    kinds = ("driver", "server", "Prefect's worker", "controller")

    def each(value: float) -> float:
        return value / ITERATIONS_OF_COST

    return Table(
        title=f"CPU seconds per iteration without the workers: {ITERATIONS_OF_COST} iterations, 2 controllers per role",
        columns=("controllers", "processes of them", *kinds, "all", "seconds per iteration"),
        rows=tuple(
            (
                cost.where,
                cost.flow_runs,
                *(each(cost.cpu_seconds.get(kind, 0.0)) for kind in kinds),
                each(sum(cost.cpu_seconds.values())),
                each(cost.seconds),
            )
            for cost in costs
        ),
        notes=("measured from the first plan to the last seal, alternating, without the final evaluation",),
    )


@contextmanager
def _deployments(home: Path) -> Iterator[BenchPlace]:
    """Run the block with a Prefect server, the deployments of prefect.yaml, and a Prefect worker.

    The worker starts the deployments' flows, as in docs/deployments.md. `home` is Prefect's home directory.
    """
    with prefect_server(home) as api:
        environ = {"PREFECT_API_URL": api, **AUTH, "PREFECT_WORKER_QUERY_SECONDS": "1", "RHEOSTAT_HOME": str(home)}
        place = BenchPlace(home, environ)
        pool = {"name": "rheostat", "type": "process"}
        httpx.post(f"{api}/work_pools/", json=pool, auth=PASSWORD, timeout=60).raise_for_status()
        command = [PREFECT, "--no-prompt", "deploy", "--all"]
        subprocess.run(command, cwd=ROOT, env=process_environment(place), stdout=subprocess.DEVNULL, check=True)
        command = [PREFECT, "worker", "start", "--pool", "rheostat"]
        worker = subprocess.Popen(command, cwd=home, env=process_environment(place), stdout=subprocess.DEVNULL)
        try:
            yield BenchPlace(home, place.environment, worker.pid)
        finally:
            below = psutil.Process(worker.pid).children(recursive=True)
            worker.terminate()
            wait_for(lambda: worker.poll() is not None, seconds=30)
            for process in below:
                if process.is_running():
                    process.kill()
            kill(worker)


def _table(runs: Sequence[ControllerCosts]) -> Table:
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
                peak_mebibytes(run.of("controller")),
                ratio(run, runs, "controller"),
                peak_mebibytes(run.of("driver")),
                ratio(run, runs, "driver"),
                *count_hits(run),
                statistics.median(process.cpu_seconds for process in run.of("controller")),
            )
            for run in runs
        ),
        notes=NOTES,
    )
