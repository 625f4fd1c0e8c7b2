"""Epochs of learning to draw that two trainers take in turns: the same record for both, each in a process of its own.

TRL's lives in another environment, which has none of our packages.
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
    """What both are asked to do."""

    pipeline: Path
    """A Stable Diffusion pipeline in diffusers format."""
    prompts: tuple[str, ...]
    """An epoch draws all of them."""
    group: int
    """Pictures of each prompt."""
    steps: int
    """Denoising steps of a picture."""
    learnt: int
    """Those that are learnt from: all, or a few."""
    guidance: float
    together: int
    """Pictures that are drawn together."""
    states: int
    """States in one forward pass of training."""
    minibatches: int
    """Optimizer steps of an epoch."""
    learning_rate: float
    clip: float
    weight_decay: float
    trail: Path
    """Where TRL writes, before it learns, the states and log-probs of the first pictures that it draws together."""

    @property
    def pictures(self) -> int:
        """Pictures of an epoch."""
        return len(self.prompts) * self.group

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), default=str))


def read_workload(path: Path) -> DrawingWorkload:
    """Read what `write` wrote."""
    record = json.loads(path.read_text())
    paths = {name: Path(record.pop(name)) for name in ("pipeline", "trail")}
    return DrawingWorkload(prompts=tuple(record.pop("prompts")), **paths, **record)


@dataclass(frozen=True, slots=True)
class EpochCost:
    """What one epoch took."""

    drawing_cpu: float
    """CPU seconds of the process and what it started: pictures, rewards, advantages."""
    drawing: float
    """The same by the clock."""
    training_cpu: float
    training: float
    loading_cpu: float
    """The part of drawing in which a new policy is loaded; none where the trainer itself draws."""
    peak_bytes: int
    """Most resident memory of the process so far."""

    @property
    def cpu(self) -> float:
        return self.drawing_cpu + self.training_cpu

    @property
    def seconds(self) -> float:
        return self.drawing + self.training


@dataclass(slots=True)
class Stopwatch:
    """CPU seconds and time of what came since it was asked last."""

    cpu: float
    clock: float

    @classmethod
    def started(cls) -> "Stopwatch":
        return cls(cpu_seconds(), time.perf_counter())

    def lap(self) -> tuple[float, float]:
        before = self.cpu, self.clock
        self.cpu, self.clock = cpu_seconds(), time.perf_counter()
        return self.cpu - before[0], self.clock - before[1]


def cpu_seconds() -> float:
    """Count user and system time of this process and all that it started."""
    me = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (me, *me.children(recursive=True)))


def peak_bytes() -> int:
    """Return the kernel's own peak of this process's resident memory: `ru_maxrss` may be its parent's."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "a process that runs has memory"
    return 1024 * int(found[1])


def answer_epochs(begin: Callable[[DrawingWorkload], Callable[[], EpochCost]]) -> None:
    """Be a trainer: take one epoch for each line on stdin, and answer it with one on stdout, which holds nothing else.

    The workload is a file that the command line names.
    """
    answers = os.fdopen(os.dup(1), "w")
    with contextlib.redirect_stdout(sys.stderr):
        take = begin(read_workload(Path(sys.argv[1])))
        for _ in sys.stdin:
            answers.write(json.dumps(asdict(take())) + "\n")
            answers.flush()


@contextmanager
def running(python: Path, module: str, path: Path) -> Iterator[Callable[[], EpochCost]]:
    """Start a trainer on one thread with the workload of a file; yields a function that has it take an epoch."""
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
            raise RuntimeError(f"{module} ended with code {child.wait()}; its last words are above")
        return EpochCost(**json.loads(answer))

    try:
        yield take
    finally:
        child.stdin.close()  # then it ends by itself, with what it started
        try:
            child.wait(timeout=30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()
