"""Whole iterations on one GPU that rollout and update share, against what the device allows, and beside TRL.

Random policies of public shapes, and completions of drawn lengths, the same for TRL; nobody learns anything. Ours is
the real job; TRL's `GRPOTrainer` has vLLM in its own process, asleep during its update. TRL has an environment of its
own, since it takes other versions of vLLM than we do; without one it is left out.

`BENCH_GPU_SIZE=tiny` takes the same path with a tiny policy, on a CPU too: its figures mean nothing.
"""

import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bench.decoders import BYTES, QWEN3_0_6B, QWEN3_1_7B, TINY, Decoder, DType, write_decoder
from bench.device import Measured, has_gpu, measured_device
from bench.drawn import DrawnLengths
from bench.gpu_tables import Taken, against_limit, beside_trl, seconds_per_stage
from bench.iterations import generated_by, iterations_of
from bench.jobs import finished_job
from bench.tables import Table
from bench.trl_workload import ColocatedVllm, TrlIteration, Workload, running_trl
from infra.environments.find import find_python
from infra.errors import BadInput
from placement.roofline import Device, Generated, limit_of

SIZE_VARIABLE = "BENCH_GPU_SIZE"
TRL_VARIABLE = "BENCH_TRL_PYTHON"
"""Python of TRL's environment; unset is the one that `make bench-gpu` makes beside ours."""
VLLM_VARIABLE = "VLLM_PYTHON"
"""Python of vLLM's environment; unset is the installed one."""

SETTLED = 1
"""The first iteration starts processes."""
ITERATIONS = SETTLED + 2
MINIBATCHES, LEARNING_RATE = 4, 1e-6
HELDOUT = 4
STATE_BYTES = 22
"""Held per weight between updates: bfloat16 weights, float32 gradients, master weights and moments, and slack."""
MARGIN_BYTES = 6 << 30
"""CUDA contexts and fragments of two processes."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A policy and how much of it is asked."""

    decoder: Decoder
    dtype: DType
    prompts: int
    group: int
    mean_tokens: float
    max_new_tokens: int
    max_batch_rows: int
    microbatch_tokens: int
    """Of our passes, in tokens."""
    trl_sequences: int
    """Of TRL's passes, in sequences."""
    reward_pattern: str
    """Found in some of the random completions of most groups, so that there is something to learn."""

    @property
    def lengths(self) -> DrawnLengths:
        sigma = 0.8
        return DrawnLengths(median_tokens=self.mean_tokens * math.exp(-(sigma**2) / 2), sigma=sigma)


SMALLER = Scale(
    decoder=QWEN3_0_6B,
    dtype="bfloat16",
    prompts=256,
    group=8,
    mean_tokens=512,
    max_new_tokens=2048,
    max_batch_rows=1024,
    microbatch_tokens=16384,
    trl_sequences=8,
    reward_pattern="[02468]{2}",
)
SCALES = (SMALLER, replace(SMALLER, decoder=QWEN3_1_7B, microbatch_tokens=8192, trl_sequences=4))
DRY = Scale(
    decoder=TINY,
    dtype="float32",
    prompts=16,
    group=4,
    mean_tokens=32,
    max_new_tokens=96,
    max_batch_rows=64,
    microbatch_tokens=4096,
    trl_sequences=8,
    reward_pattern="[02468]",
)


def measure() -> Iterator[Table]:
    """Measure at every scale; BadInput where there is no GPU."""
    scales = _scales(os.environ.get(SIZE_VARIABLE))
    given = os.environ.get(VLLM_VARIABLE)
    python = find_python("vllm", Path(given) if given else None)
    for scale in scales:
        yield from _measured(scale, python)


def _scales(size: str | None) -> tuple[Scale, ...]:
    if size not in (None, "tiny"):
        raise BadInput(f"{SIZE_VARIABLE}: expected tiny or nothing, found {size!r}")
    if size == "tiny":
        return (DRY,)
    if not has_gpu():
        raise BadInput(f"the part gpu: expected a CUDA GPU, found none ({SIZE_VARIABLE}=tiny tries the path on a CPU)")
    return SCALES


def _measured(scale: Scale, python: Path) -> Iterator[Table]:
    """Ours first, then TRL with the lengths that ours had."""
    found = measured_device(scale.dtype, threads=1)
    device = Device(flops=found.flops, bandwidth=found.bandwidth)
    share = server_share(found.memory, scale.decoder)
    with tempfile.TemporaryDirectory(prefix="rheostat-bench-") as name:
        directory = Path(name)
        write_decoder(directory / "policy", scale.decoder, dtype=scale.dtype)
        prompts = _write_problems(directory, scale)
        config = directory / "config.toml"
        config.write_text(config_of(directory, scale, python=python, share=share, cuda=found.cuda))
        with finished_job(config) as job:
            iterations = iterations_of(job.run)
            made = [generated_by(job.run, number + 1) for number in range(ITERATIONS)]
        limits = [
            limit_of(one, scale.decoder, device, bytes_per_weight=BYTES[scale.dtype], steps=MINIBATCHES) for one in made
        ]
        taken = [Taken(*one) for one in list(zip(iterations, made, limits, strict=True))[SETTLED:]]
        yield seconds_per_stage(taken, scale.decoder)
        yield against_limit(taken, scale.decoder, found)
        yield beside_trl(
            taken, _trl(scale, directory, prompts, made=made, share=share, device=found), scale.decoder, found
        )


def server_share(memory: int, decoder: Decoder) -> float:
    """Return the share of the GPU's memory that a server may take beside a trainer that stays."""
    if not memory:
        return 0.85
    left = (memory - STATE_BYTES * decoder.parameters - MARGIN_BYTES) / memory
    if left < 0.1:
        raise BadInput(f"{decoder.name}: expected a GPU with more than {memory / 2**30:.0f} GiB of memory")
    return round(min(0.85, left), 2)


def _write_problems(directory: Path, scale: Scale) -> tuple[str, ...]:
    prompts = tuple(
        f"Ana has {row} pens, buys {row % 7} and sells {row % 5}. How many? " for row in range(scale.prompts)
    )
    heldout = tuple(f"Held out: {row}. " for row in range(HELDOUT))
    for name, texts in (("train", prompts), ("heldout", heldout)):
        lines = (json.dumps({"prompt": text, "answer": "x"}) for text in texts)
        (directory / f"{name}.jsonl").write_text("\n".join(lines))
    return prompts


def config_of(directory: Path, scale: Scale, *, python: Path, share: float, cuda: bool) -> str:
    """The job as a user would write it: one worker and one rank, which share the GPU and take turns on it."""
    gpus = 0.5 if cuda else 0
    return f"""
name = "bench"
iterations = {ITERATIONS}
[data]
kind = "file"
path = "{directory}/train.jsonl"
heldout_path = "{directory}/heldout.jsonl"
[policy]
kind = "directory"
path = "{directory}/policy"
[rollout]
prompts = {scale.prompts}
group_size = {scale.group}
shard_prompts = {scale.prompts}
[rollout.sampling]
max_new_tokens = {scale.max_new_tokens}
[rollout.engine]
kind = "target"
target = "bench.drawn:DrawnVllm"
[rollout.engine.options]
python = "{python}"
dtype = "{scale.dtype}"
max_batch_rows = {scale.max_batch_rows}
{f"gpu_memory_share = {share}" if cuda else "cache_gib = 0.1"}
[rollout.engine.options.lengths]
median_tokens = {scale.lengths.median_tokens}
sigma = {scale.lengths.sigma}
[scoring]
rewards = [{{ kind = "regex", pattern = "{scale.reward_pattern}" }}]
[algorithm]
kind = "grpo"
keep_uninformative = true
[update]
learning_rate = {LEARNING_RATE}
minibatches = {MINIBATCHES}
microbatch_tokens = {scale.microbatch_tokens}
dtype = "{scale.dtype}"
[pools]
workers = 1
update_ranks = 1
gpus_per_worker = {gpus}
gpus_per_update_rank = {gpus}
stall_seconds = 900
[controllers]
count = 1
[evaluation]
problems = {HELDOUT}
"""


def _trl(
    scale: Scale, directory: Path, prompts: tuple[str, ...], *, made: list[Generated], share: float, device: Measured
) -> list[TrlIteration]:
    """Have TRL take as many iterations; none where it has no environment."""
    given = os.environ.get(TRL_VARIABLE)
    python = Path(given) if given else Path(f"{sys.prefix}-trl") / "bin" / "python"
    if not python.exists():
        sys.stderr.write(f"TRL is left out: no {python}; `make bench-gpu` makes its environment\n")
        return []
    workload = Workload(
        policy=directory / "policy",
        prompts=prompts,
        group=scale.group,
        minibatches=MINIBATCHES,
        learning_rate=LEARNING_RATE,
        reward_pattern=scale.reward_pattern,
        max_new_tokens=scale.max_new_tokens,
        block=ITERATIONS,
        blocks=1,
        microbatch=scale.trl_sequences,
        bfloat16=scale.dtype == "bfloat16",
        vllm=ColocatedVllm(
            memory_share=share,
            context=scale.decoder.context,
            sleeps=device.cuda,
            lengths=tuple(tuple(length for _, length in one.contexts) for one in made),
        ),
    )
    with running_trl(python, workload, directory / "trl.json") as take_block:
        return take_block()[SETTLED:]
