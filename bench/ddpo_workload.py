"""Workload for two trainers that run epochs of text-to-image training in turns, each in a separate process.

TRL's process runs in another environment, which does not contain Rheostat's packages.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class DrawingWorkload:
    """Settings of the workload, which are the same for both trainers."""

    pipeline: Path
    """Directory of a Stable Diffusion pipeline in diffusers format."""
    prompts: tuple[str, ...]
    """Prompts for which every epoch generates images."""
    group: int
    """Number of images per prompt."""
    steps: int
    """Number of denoising steps per image."""
    learnt: int
    """Number of denoising steps that are trained: all, or a few."""
    guidance: float
    together: int
    """Number of images that are generated together."""
    states: int
    """Number of states in one forward pass of training."""
    minibatches: int
    """Number of optimizer steps per epoch."""
    learning_rate: float
    clip: float
    weight_decay: float
    trail: Path
    """File to which TRL writes, before training, the states and log-probs of its first images."""

    @property
    def pictures(self) -> int:
        """Number of images per epoch."""
        return len(self.prompts) * self.group

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), default=str))


def read_workload(path: Path) -> DrawingWorkload:
    """Read a workload that `DrawingWorkload.write` wrote."""
    record = json.loads(path.read_text())
    paths = {name: Path(record.pop(name)) for name in ("pipeline", "trail")}
    return DrawingWorkload(prompts=tuple(record.pop("prompts")), **paths, **record)


@dataclass(frozen=True, slots=True)
class EpochCost:
    """Cost of one epoch."""

    drawing_cpu: float
    """CPU seconds of the process and its children for images, rewards and advantages."""
    drawing: float
    """Wall-clock seconds of the same."""
    training_cpu: float
    training: float
    loading_cpu: float
    """CPU seconds, within `drawing_cpu`, for loading the new policy. 0 if the trainer itself generates the images."""
    peak_bytes: int
    """Peak resident memory of the process so far."""

    @property
    def cpu(self) -> float:
        return self.drawing_cpu + self.training_cpu

    @property
    def seconds(self) -> float:
        return self.drawing + self.training


@dataclass(slots=True)
class Stopwatch:
    """Timer that returns the CPU and wall-clock seconds since its last call."""

    cpu: float
    clock: float

    @classmethod
    def started(cls) -> "Stopwatch":
        return cls(cpu_seconds(), time.perf_counter())

    def restart(self) -> tuple[float, float]:
        before = self.cpu, self.clock
        self.cpu, self.clock = cpu_seconds(), time.perf_counter()
        return self.cpu - before[0], self.clock - before[1]


def cpu_seconds() -> float:
    """Return the user and system time, in seconds, of this process and its children."""
    me = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (me, *me.children(recursive=True)))


def peak_bytes() -> int:
    """Return the kernel's peak of this process's resident memory. `ru_maxrss` may be the parent's."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None, "a running process reports VmHWM"
    return 1024 * int(match[1])


def serve_epochs(begin: Callable[[DrawingWorkload], Callable[[], EpochCost]]) -> None:
    """Run one epoch for each line on stdin and answer with its cost as one line on stdout, which has no other output.

    The first argument on the command line is the file of the workload.
    """
    answers = os.fdopen(os.dup(1), "w")
    with contextlib.redirect_stdout(sys.stderr):
        take = begin(read_workload(Path(sys.argv[1])))
        for _ in sys.stdin:
            answers.write(json.dumps(asdict(take())) + "\n")
            answers.flush()


@contextmanager
def start_trainer(python: Path, module: str, path: Path) -> Iterator[Callable[[], EpochCost]]:
    """Run the block with a trainer process on one thread. Yields a function that runs one epoch in the trainer."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    child = subprocess.Popen(
        [str(python), "-m", module, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert child.stdin is not None and child.stdout is not None

    def take() -> EpochCost:
        child.stdin.write("go\n")
        child.stdin.flush()
        answer = child.stdout.readline()
        if not answer:
            raise RuntimeError(f"{module} failed with exit code {child.wait()}; see its output above")
        return EpochCost(**json.loads(answer))

    try:
        yield take
    finally:
        child.stdin.close()  # then it and its children end
        try:
            child.wait(timeout=30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()
