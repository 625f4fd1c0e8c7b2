"""Workload for TRL, stored as a file, because TRL's environment may not contain Rheostat's packages."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

CPU_VLLM = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
"""Environment variables that let vLLM's CPU build run next to a trainer.

Without them it would bind the threads of both to the same cores and use half of the memory.
"""


@dataclass(frozen=True, slots=True)
class ColocatedVllm:
    """Settings of the vLLM engine that TRL runs inside the trainer's process."""

    memory_share: float
    """Share of the GPU's memory that vLLM uses while it is awake."""
    context: int
    """Maximum length of prompt plus completion, in tokens."""
    sleeps: bool
    """Whether vLLM releases its GPU memory during the update. Must be false for vLLM's CPU build."""
    lengths: tuple[tuple[int, ...], ...]
    """Completion lengths in tokens, as one tuple per iteration.

    They are fixed, because random policies rarely generate EOS.
    """


@dataclass(frozen=True, slots=True)
class Workload:
    """Settings of the GRPO training that TRL runs in the benchmark.

    TRL runs the iterations in blocks and pauses between blocks.
    """

    policy: Path
    prompts: tuple[str, ...]
    """Training prompts. Every iteration uses all of them."""
    group: int
    minibatches: int
    """Number of optimizer steps per iteration."""
    learning_rate: float
    reward_pattern: str
    """Regular expression that gives a completion the reward 1 if it matches, and 0 otherwise."""
    max_new_tokens: int
    block: int
    """Number of iterations that TRL runs before it pauses, so that another trainer can be measured."""
    blocks: int
    microbatch: int
    """Number of sequences in one forward pass of training."""
    images: tuple[Path, ...] = ()
    """Image files, one per prompt, that precede the prompts' texts. Empty for text-only policies."""
    bfloat16: bool = False
    vllm: ColocatedVllm | None = None
    """Settings of the vLLM engine, or None if TRL generates with transformers."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), default=str))


def read_workload(path: Path) -> Workload:
    """Read the settings of a TRL workload from a JSON file that `Workload.write` wrote."""
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
    """Times in seconds, token count and memory of one training iteration of TRL."""

    started: float
    generation: float = 0.0
    """Seconds for generating completions and computing rewards, including loading weights into vLLM."""
    weights: float = 0.0
    """Seconds, within `generation`, in which vLLM loads the weights. 0 without vLLM."""
    old_logprobs: float = 0.0
    seconds: float = 0.0
    """Seconds of the whole iteration."""
    tokens: int = 0
    """Number of completion tokens generated in the iteration."""
    images: int = 0
    """Number of images that the vision tower encoded during generation and update. Repetitions count."""
    peak_bytes: int = 0
    """Peak resident memory of TRL's process so far, in bytes."""


@contextmanager
def start_trl(python: Path, workload: Workload, path: Path) -> Iterator[Callable[[], list[TrlIteration]]]:
    """Start a TRL training process and stop it after the block.

    Yields a function that runs one block of iterations in TRL and returns their times. `python` is the interpreter of
    TRL's environment, and the workload is written to `path`.
    """
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
