"""Controllers as sub-flows, by number and payload per sample: memory, CPU time, and payload in the driver.

The payload is each problem's reference answer of up to 1 MB, as an image or a test suite would be. Every rollout
carries it from the prompts' shard to the rewards. Except for its head, which the final report shows, the payload
repeats a random marker in every memory page. A process that holds payload therefore has the marker in its memory, which
is searched while the run continues.
"""

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.inputs import GROUP, write_inputs
from bench.processes import PAGE, ProcessUsage, cpu_seconds, files_with, measure_processes, wait_for
from bench.tables import Table
from tests.support.jobs import RHEOSTAT, ROOT, kill

PAYLOADS = (4 * 1024, 1024 * 1024)
"""Sizes in bytes of the reference answer that each sample carries through the pipeline as payload."""
CONTROLLERS = (1, 2, 4, 8)
PROMPTS, SHARD_PROMPTS = 16, 2
ITERATIONS = 2
SAMPLES = PROMPTS * GROUP
"""Number of samples (completions) per iteration. They are stored in 8 shards of 16."""
HITS = ("searches", "that found payload", "of workers", "that found it")
NOTES = (
    "peak: VmHWM with pages of mapped files; ratio: to the smallest payload with the same number of controllers",
    "searches: scans of the memory of the driver and all controllers while they ran. Workers contain payload, which "
    "proves that a scan finds it",
    "Prefect's home, including database and results, was scanned at the end: no file contained payload",
)


@dataclass(frozen=True, slots=True)
class ControllerCosts:
    """Memory and CPU time of the processes of one job with a given number of controllers and payload per sample."""

    controllers: int
    payload_bytes: int
    iterations: int
    driver_cpu_seconds: float
    """CPU seconds of the driver process from the plan of the first iteration to the end of the last iteration."""
    processes: tuple[ProcessUsage, ...]
    files: tuple[Path, ...]
    """Files in Prefect's home directory that contain the marker text of the test data. There should be none, because
    results are stored in the run store and not in Prefect."""

    def of(self, kind: str) -> list[ProcessUsage]:
        """Return the measurements of all processes of one kind: "driver", "controller" or "worker"."""
        return [process for process in self.processes if process.kind == kind]

    @property
    def flow_processes(self) -> list[ProcessUsage]:
        """Measurements of the driver and of all controllers, which are the processes that run Prefect flows."""
        return [*self.of("driver"), *self.of("controller")]

    def cpu_per_10_000(self, seconds: float) -> float:
        """Convert the CPU seconds of a run to CPU seconds per 10,000 samples."""
        return seconds * 10_000 / (SAMPLES * self.iterations)


@dataclass(frozen=True, slots=True)
class BenchPlace:
    """Environment for jobs of this benchmark.

    It contains Prefect's home directory, environment variables, and the process ID of the Prefect worker that starts
    controllers. The ID is None if controllers run in the driver.
    """

    home: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    worker: int | None = None


def measure() -> list[Table]:
    """Run the same job with 1 to 8 controllers, each with a small and a large payload per sample.

    Return a table with the driver's peak memory, the processes whose memory contains payload, and the driver's CPU
    time.
    """
    runs = []
    for controllers in CONTROLLERS:
        for payload in PAYLOADS:
            with tempfile.TemporaryDirectory(prefix="rheostat-bench-") as home:
                runs.append(run_job(BenchPlace(Path(home)), controllers, payload, iterations=ITERATIONS))
    return [_table(runs)]


def run_job(place: BenchPlace, controllers: int, payload: int, *, iterations: int) -> ControllerCosts:
    """Run one job, and measure the memory and CPU time of its processes until they end.

    `payload` is the number of bytes of payload per sample. Raises RuntimeError if the job fails.
    """
    marker = secrets.token_hex(16).encode()
    where = "nested" if place.worker is None else "deployment"
    sys.stderr.write(f"measuring {controllers} controllers ({where}) with {payload} bytes per sample\n")
    with tempfile.TemporaryDirectory(prefix="rheostat-bench-") as name:
        directory = Path(name)
        inputs = write_inputs(directory, shape={}, max_new_tokens=16, answer=_payload(marker, payload))
        overrides = [f"iterations={iterations}", f"rollout.prompts={PROMPTS}", f"rollout.shard_prompts={SHARD_PROMPTS}"]
        overrides += [f"data.limit={PROMPTS}", f"controllers.count={controllers}", f"controllers.where={where}"]
        command = [RHEOSTAT, "train", str(inputs.config), *overrides, "--run", "bench", "--store", name]
        manifests = directory / "bench" / "manifests"
        driver = subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr, env=process_environment(place))
        try:
            with measure_processes(lambda: list_processes(driver.pid, place), marker=marker) as watched:
                wait_for(manifests / "it-0001/plan.json", lambda: driver.poll() is not None)
                before = cpu_seconds(driver.pid)
                wait_for(manifests / f"it-{iterations:04d}/seal.json", lambda: driver.poll() is not None)
                used = cpu_seconds(driver.pid) - before
                driver.wait()
        finally:
            kill(driver)
        if driver.returncode:
            raise RuntimeError(f"{' '.join(command)} failed with exit code {driver.returncode}")
        files = tuple(files_with(place.home, marker))
    return ControllerCosts(controllers, payload, iterations, used, tuple(watched.values()), files)


def _payload(marker: bytes, size: int) -> str:
    """Return a text of `size` characters that contains the marker in every memory page except the first half page.

    The run's final report shows the start of the text, which is therefore free of the marker.
    """
    head = "." * (PAGE // 2)
    line = f"{marker.decode()}{'.' * (PAGE // 2 - len(marker))}"
    return (head + line * (size // len(line)))[:size]


def list_processes(driver: int, place: BenchPlace) -> dict[int, str]:
    """Return the kind of each process of a job by process ID: "driver", "worker" or "controller".

    `driver` is the process ID of the job's driver.
    """
    try:
        below = psutil.Process(driver).children(recursive=True)
        above = psutil.Process(place.worker).children(recursive=True) if place.worker else []
    except psutil.NoSuchProcess:
        return {}
    kinds = {driver: "driver"}
    for process in (*below, *above):
        try:
            line = " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue
        if line.startswith("ray::"):
            kinds[process.pid] = "worker"
        elif "-m prefect.engine" in line:
            kinds[process.pid] = "controller"
    return kinds


def process_environment(place: BenchPlace) -> dict[str, str]:
    """Return the environment variables for a process of the benchmark.

    Prefect's settings are those of `place` instead of those of the current process.
    """
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return {**variables, "PREFECT_HOME": str(place.home), **place.environment}


def _table(runs: Sequence[ControllerCosts]) -> Table:
    return Table(
        title=f"Controllers as sub-flows of the driver: {ITERATIONS} iterations of {SAMPLES} samples in 8 shards",
        columns=("controllers", "KiB per sample", "driver's peak, MiB", "ratio", *HITS, "CPU s / 10,000 samples"),
        rows=tuple(
            (
                str(run.controllers),
                run.payload_bytes // 1024,
                peak_mebibytes(run.of("driver")),
                ratio(run, runs, "driver"),
                *count_hits(run),
                run.cpu_per_10_000(run.driver_cpu_seconds),
            )
            for run in runs
        ),
        notes=NOTES,
    )


def count_hits(run: ControllerCosts) -> tuple[int, int, int, int]:
    """Count how often a job's memory was searched for payload and how often payload was found.

    Returns searches and finds for the driver and controllers, then searches and finds for workers. Raises
    AssertionError if a file of Prefect contains payload.
    """
    assert not run.files, f"these files contain payload: {', '.join(map(str, run.files))}"
    flows, workers = run.flow_processes, run.of("worker")
    return (
        sum(process.searches for process in flows),
        sum(process.hits for process in flows),
        sum(process.searches for process in workers),
        sum(process.hits for process in workers),
    )


def peak_mebibytes(processes: Sequence[ProcessUsage]) -> float:
    """Return the largest peak memory of the processes in MiB."""
    return max(process.peak_bytes for process in processes) / 2**20


def ratio(run: ControllerCosts, runs: Sequence[ControllerCosts], kind: str) -> float:
    """Return the ratio of a run's peak memory to that of the run with as many controllers and the smallest payload.

    `kind` selects the processes: "driver", "controller" or "worker".
    """
    small = next(other for other in runs if other.controllers == run.controllers)
    return peak_mebibytes(run.of(kind)) / peak_mebibytes(small.of(kind))
