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

from rheostat.infra.store.runs import Run, open_run

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "configs" / "demo.toml"
NAME = "bench"
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """Run of a job that has finished, with the seconds of the job.

    The run can be read until its temporary store is deleted.
    """

    run: Run
    seconds: float


class PeakMemory:
    """Callback that records the largest resident memory, in bytes, of any child process of a job.

    Memory is read once per second. Pass an instance as `on_poll` to `run_job_to_end`.
    """

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
def run_job_to_end(
    config: Path,
    overrides: Sequence[str] = (),
    *,
    initial_store: Path | None = None,
    on_poll: Callable[[int, Path], None] = lambda _pid, _run: None,
):
    """Run `rheostat train` to the end in a temporary store, and yield the finished job for the block.

    The store is deleted after the block. If `initial_store` is given, the job starts on a copy of it. While the job
    runs, `on_poll` is called repeatedly with the job's process ID and the run's directory. Raises RuntimeError if the
    job fails.
    """
    with tempfile.TemporaryDirectory(prefix="rheostat-bench-") as directory:
        store = f"{directory}/store"
        if initial_store is not None:
            shutil.copytree(initial_store, store)
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
                on_poll(child.pid, Path(store, NAME))
                time.sleep(POLL_SECONDS)
        finally:
            child.terminate()
            child.wait()
        if child.returncode:
            raise RuntimeError(f"{' '.join(command)} failed with exit code {child.returncode}")
        yield FinishedJob(run=open_run(store, NAME), seconds=time.monotonic() - started)


def run_command(home: Path, *words: str) -> str:
    """Run a quiet command of Rheostat in a folder, with its store in `runs`, and return what it printed. Raises
    RuntimeError if it fails."""
    command = [str(Path(sys.executable).with_name("rheostat")), *words, "--store", str(home / "runs"), "--quiet"]
    environment = {**os.environ, "PREFECT_HOME": str(home / "prefect")}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=sys.stderr, env=environment, check=False, text=True, cwd=home
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with exit code {done.returncode}")
    return done.stdout
