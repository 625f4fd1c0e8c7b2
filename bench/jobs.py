"""Real jobs, started like a user starts them."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from infra.store.runs import Run, open_run

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "configs" / "demo.toml"
NAME = "bench"
LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Job:
    """Finished run, still in its store."""

    run: Run
    seconds: float


class PeakMemory:
    """Peak resident memory of any single process of a job, polled every second. Pass an instance to `finished_job`."""

    def __init__(self) -> None:
        self.bytes = 0
        self._next = 0.0

    def __call__(self, pid: int, _run: Path) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + 1
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                self.bytes = max(self.bytes, process.memory_info().rss)


@contextmanager
def finished_job(
    config: Path,
    overrides: Sequence[str] = (),
    *,
    begun: Path | None = None,
    meanwhile: Callable[[int, Path], None] = lambda _pid, _run: None,
):
    """Run the block with a job that `rheostat train` has finished in a temporary store, or in a copy of a `begun` one.

    `meanwhile` is called repeatedly with the job's process ID and the run's directory. Raises RuntimeError if the job
    fails.
    """
    with tempfile.TemporaryDirectory(prefix="rheostat-bench-") as directory:
        store = f"{directory}/store"
        if begun is not None:
            shutil.copytree(begun, store)
        command = [str(Path(sys.executable).with_name("rheostat")), "train", str(config), *overrides]
        started = time.monotonic()
        child = subprocess.Popen(
            [*command, "--run", NAME, "--store", store],
            stdout=sys.stderr,
            env={
                **os.environ,
                "PREFECT_HOME": f"{directory}/prefect",
                "PYTHONPATH": str(ROOT),
            },  # for the engines in bench
        )
        try:
            while child.poll() is None:
                meanwhile(child.pid, Path(store, NAME))
                time.sleep(LOOK_SECONDS)
        finally:
            child.terminate()
            child.wait()
        if child.returncode:
            raise RuntimeError(f"{' '.join(command)} failed with exit code {child.returncode}")
        yield Job(run=open_run(store, NAME), seconds=time.monotonic() - started)
