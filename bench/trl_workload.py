"""What TRL is asked to do, as a file: its trainer may live in another environment, which has none of our packages."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

CPU_VLLM = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
"""What vLLM's CPU build needs beside a trainer: it would bind the threads of both, and take half of the memory."""


@dataclass(frozen=True, slots=True)
class ColocatedVllm:
    """How TRL's own vLLM generates in the trainer's process."""

    memory_share: float
    """Of the GPU, while it is awake."""
    context: int
    """Longest sequence in tokens."""
    sleeps: bool
    """Whether it gives its memory back during the update; a CPU's build cannot."""
    lengths: tuple[tuple[int, ...], ...]
    """By iteration, the length of each completion: random policies do not end by themselves."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Iterations that TRL takes in blocks, each begun by a line on its stdin and answered by one on its stdout."""

    policy: Path
    prompts: tuple[str, ...]
    """An iteration asks all of them."""
    group: int
    minibatches: int
    """Optimizer steps per iteration."""
    learning_rate: float
    reward_pattern: str
    """A completion in which it is found has the reward 1."""
    max_new_tokens: int
    block: int
    """Iterations per block."""
    blocks: int
    microbatch: int
    """Sequences in one forward pass."""
    images: tuple[Path, ...] = ()
    """The picture that each prompt shows before its text; none for policies that read text alone."""
    bfloat16: bool = False
    vllm: ColocatedVllm | None = None
    """None generates with transformers."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), default=str))


def read_workload(path: Path) -> Workload:
    """Read what `write` wrote."""
    record = json.loads(path.read_text())
    vllm = record.pop("vllm")
    lengths = tuple(map(tuple, vllm.pop("lengths"))) if vllm else ()
    return Workload(
        policy=Path(record.pop("policy")),
        prompts=tuple(record.pop("prompts")),
        images=tuple(map(Path, record.pop("images"))),
        vllm=ColocatedVllm(**vllm, lengths=lengths) if vllm else None,
        **record,
    )


@dataclass(slots=True)
class TrlIteration:
    """One iteration of TRL in seconds."""

    started: float
    generation: float = 0.0
    """Generation and rewards, and giving vLLM the weights."""
    weights: float = 0.0
    """The part of generation in which vLLM takes the weights."""
    old_logprobs: float = 0.0
    seconds: float = 0.0
    """All of it."""
    tokens: int = 0
    """Completion tokens."""
    images: int = 0
    """Times that the tower read an image, in generation and in the update."""
    peak_bytes: int = 0
    """Most resident memory of its process so far."""


@contextmanager
def running_trl(python: Path, workload: Workload, path: Path) -> Iterator[Callable[[], list[TrlIteration]]]:
    """Start TRL; yields a function that has it take one block of iterations."""
    workload.write(path)
    command = [str(python), "-m", "bench.trl_trainer", str(path)]
    environment = {**CPU_VLLM, **os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert child.stdin is not None and child.stdout is not None

    def take_block() -> list[TrlIteration]:
        child.stdin.write("go\n")
        child.stdin.flush()
        answer = child.stdout.readline()
        if not answer:
            raise RuntimeError(f"TRL ended with code {child.wait()}; its last words are above")
        return [TrlIteration(**taken) for taken in json.loads(answer)]

    try:
        yield take_block
    finally:
        child.kill()
        child.communicate()
