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
    """Settings of the text-to-image training that Rheostat and TRL both run in the benchmark."""

    pipeline: Path
    """Directory of a Stable Diffusion pipeline in diffusers format."""
    prompts: tuple[str, ...]
    """Prompts for which every epoch generates images."""
    group: int
    """Number of images per prompt."""
    steps: int
    """Number of denoising steps per image."""
    learnt: int
    """Number of denoising steps per image that are trained on. At most `steps`."""
    guidance: float
    together: int
    """Number of images that are generated in one batch."""
    states: int
    """Number of denoising states in one forward pass of training."""
    minibatches: int
    """Number of optimizer steps per epoch."""
    learning_rate: float
    clip: float
    weight_decay: float
    trail: Path
    """File to which TRL writes denoising states and their log-probs before training.

    The benchmark compares them with the log-probs that Rheostat computes.
    """

    @property
    def pictures(self) -> int:
        """Number of images per epoch."""
        return len(self.prompts) * self.group

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), default=str))


def read_workload(path: Path) -> DrawingWorkload:
    """Read the settings of a text-to-image workload from a JSON file that `DrawingWorkload.write` wrote."""
    record = json.loads(path.read_text())
    paths = {name: Path(record.pop(name)) for name in ("pipeline", "trail")}
    return DrawingWorkload(prompts=tuple(record.pop("prompts")), **paths, **record)


@dataclass(frozen=True, slots=True)
class EpochCost:
    """CPU seconds, wall-clock seconds and peak memory of one training epoch of a text-to-image policy."""

    drawing_cpu: float
    """CPU seconds of the trainer process and its children for generating images and scoring them.

    Rheostat's seconds include computing advantages.
    """
    drawing: float
    """Wall-clock seconds for generating images and scoring them. Rheostat's seconds include computing advantages."""
    training_cpu: float
    training: float
    loading_cpu: float
    """CPU seconds for loading the new policy before generation, which `drawing_cpu` includes.

    0 if the trainer itself generates the images.
    """
    peak_bytes: int
    """Peak resident memory of the trainer process so far, in bytes."""

    @property
    def cpu(self) -> float:
        return self.drawing_cpu + self.training_cpu

    @property
    def seconds(self) -> float:
        return self.drawing + self.training


@dataclass(slots=True)
class Stopwatch:
    """Timer of this process and its children. `restart` returns the CPU and wall-clock seconds since the last start."""

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
    """Return the peak resident memory of this process in bytes, from the kernel's VmHWM.

    `ru_maxrss` is not used, because it can be the value of the parent process.
    """
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None, "a running process reports VmHWM"
    return 1024 * int(match[1])


def serve_epochs(begin: Callable[[DrawingWorkload], Callable[[], EpochCost]]) -> None:
    """Run one training epoch for each line on stdin, and write the epoch's cost as one line of JSON to stdout.

    `begin` sets up a trainer and returns the function that runs an epoch. The first command-line argument is the file
    of the workload. Other output of the process goes to stderr.
    """
    answers = os.fdopen(os.dup(1), "w")
    with contextlib.redirect_stdout(sys.stderr):
        take = begin(read_workload(Path(sys.argv[1])))
        for _ in sys.stdin:
            answers.write(json.dumps(asdict(take())) + "\n")
            answers.flush()


@contextmanager
def start_trainer(python: Path, module: str, path: Path) -> Iterator[Callable[[], EpochCost]]:
    """Start a trainer process on one thread and stop it after the block.

    Yields a function that runs one training epoch in the trainer and returns its cost. `python` is the interpreter,
    `module` the trainer's module, and `path` the file of the workload.
    """
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
