"""Workload for TRL, stored as a file, because TRL's environment may not contain Rheostat's packages."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

CPU_VLLM = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
"""Environment variables for vLLM's CPU build next to a trainer.
By default it would bind the threads of both and use half of the memory.
"""


@dataclass(frozen=True, slots=True)
class ColocatedVllm:
    """Settings of TRL's own vLLM, which generates in the trainer's process."""

    memory_share: float
    """Share of the GPU's memory while vLLM is awake."""
    context: int
    """Longest sequence in tokens."""
    sleeps: bool
    """Whether vLLM releases its memory during the update. The CPU build cannot."""
    lengths: tuple[tuple[int, ...], ...]
    """Lengths of the completions by iteration, because random policies do not end by themselves."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Iterations that TRL runs in blocks. A line on its stdin starts a block, and a line on its stdout answers it."""

    policy: Path
    prompts: tuple[str, ...]
    """Training prompts. Every iteration uses all of them."""
    group: int
    minibatches: int
    """Optimizer steps per iteration."""
    learning_rate: float
    reward_pattern: str
    """Regular expression. A completion that matches it has the reward 1."""
    max_new_tokens: int
    block: int
    """Number of iterations per block."""
    blocks: int
    microbatch: int
    """Number of sequences in one forward pass."""
    images: tuple[Path, ...] = ()
    """Image before the text of each prompt. Empty for text-only policies."""
    bfloat16: bool = False
    vllm: ColocatedVllm | None = None
    """Settings of vLLM, or None to generate with transformers."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), default=str))


def read_workload(path: Path) -> Workload:
    """Read a workload that `Workload.write` wrote."""
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
    """Times of one iteration of TRL in seconds."""

    started: float
    generation: float = 0.0
    """Generation and rewards, including the loading of weights into vLLM."""
    weights: float = 0.0
    """Part of `generation` in which vLLM loads the weights."""
    old_logprobs: float = 0.0
    seconds: float = 0.0
    """Whole iteration."""
    tokens: int = 0
    """Number of completion tokens."""
    images: int = 0
    """Number of times that the vision tower encoded an image, in generation and in the update."""
    peak_bytes: int = 0
    """Peak resident memory of the process so far."""


@contextmanager
def start_trl(python: Path, workload: Workload, path: Path) -> Iterator[Callable[[], list[TrlIteration]]]:
    """Run the block with a TRL process. Yields a function that runs one block of iterations in TRL."""
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
            raise RuntimeError(f"TRL failed with exit code {child.wait()}; see its output above")
        return [TrlIteration(**fields) for fields in json.loads(answer)]

    try:
        yield take_block
    finally:
        child.kill()
        child.communicate()
