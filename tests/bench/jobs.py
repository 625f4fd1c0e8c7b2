"""The real job, started as a user starts it, and what its processes cost."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from infra.runs import Run, open_run

DEMO = Path(__file__).parents[2] / "configs" / "demo.toml"
NAME = "bench"
POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Job:
    """A finished run, still in its store."""

    run: Run
    seconds: float
    controller_peak_bytes: int
    """Largest resident size of the process that runs the flows: not its workers, not Prefect's server."""


@contextmanager
def finished_job(config: Path, overrides: Sequence[str] = ()):
    """Run `rheostat train` to its end in a store of its own, which goes when the context ends."""
    with tempfile.TemporaryDirectory(prefix="rheostat-bench-") as directory:
        store = f"{directory}/store"
        command = [str(Path(sys.executable).with_name("rheostat")), "train", str(config), *overrides]
        started = time.monotonic()
        child = subprocess.Popen(
            [*command, "--run", NAME, "--store", store],
            stdout=sys.stderr,
            env={**os.environ, "PREFECT_HOME": f"{directory}/prefect"},
        )
        try:
            peak = _peak_bytes(child)
        finally:
            child.terminate()
            child.wait()
        if child.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with code {child.returncode}")
        yield Job(run=open_run(store, NAME), seconds=time.monotonic() - started, controller_peak_bytes=peak)


def _peak_bytes(child: subprocess.Popen[bytes]) -> int:
    """Wait for the process; the kernel counts its peak, so that no moment is missed between looks."""
    peak = 0
    while child.poll() is None:
        try:
            status = Path(f"/proc/{child.pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            break
        peak = max([peak, *(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))])
        time.sleep(POLL_SECONDS)
    child.wait()
    return peak
