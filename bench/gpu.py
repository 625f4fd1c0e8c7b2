"""Whole iterations on one GPU shared by rollout and update, compared with the limit of the device and with TRL.

Policies have public shapes and random weights, and completions have sampled lengths, which are the same for TRL.
Nothing useful is learned. Rheostat runs the real job. TRL's `GRPOTrainer` has vLLM in its own process, asleep during
the update. TRL runs in a separate environment, because it requires other versions of vLLM. Without that environment TRL
is skipped.

`BENCH_GPU_SIZE=tiny` runs the same code with a tiny policy, also on a CPU. Its figures have no meaning.
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
from bench.device import DeviceSpeed, has_gpu, measure_device
from bench.drawn import DrawnLengths
from bench.gpu_tables import MeasuredIteration, compare_with_limit, compare_with_trl, seconds_per_stage
from bench.iterations import read_iterations, read_lengths
from bench.jobs import run_job_to_end
from bench.tables import Table
from bench.trl_workload import ColocatedVllm, TrlIteration, Workload, start_trl
from rheostat.infra.environments.find import find_python
from rheostat.infra.errors import BadInput
from rheostat.placement.roofline import Device, Generated, compute_limit

SIZE_VARIABLE = "BENCH_GPU_SIZE"
TRL_VARIABLE = "BENCH_TRL_PYTHON"
"""Name of the environment variable that contains the path of the Python interpreter of TRL's environment.

If the variable is not set, the environment that `make bench-gpu` builds is used.
"""
VLLM_VARIABLE = "VLLM_PYTHON"
"""Name of the environment variable that contains the path of the Python interpreter of vLLM's environment.

If the variable is not set, the installed environment of vLLM is used.
"""

SETTLED = 1
"""Number of iterations at the start that are left out of the results, because they include starting processes."""
ITERATIONS = SETTLED + 2
MINIBATCHES, LEARNING_RATE = 4, 1e-6
HELDOUT = 4
STATE_BYTES = 22
"""GPU memory per weight, in bytes, that the trainer holds between updates.

This includes bfloat16 weights, float32 gradients, master weights, moments, and a margin.
"""
MARGIN_BYTES = 6 << 30
"""GPU memory in bytes that is reserved for the CUDA contexts and memory fragmentation of two processes."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Size of one GPU benchmark: the policy model, the number and lengths of completions, and the batch sizes."""

    decoder: Decoder
    dtype: DType
    prompts: int
    group: int
    mean_tokens: float
    max_new_tokens: int
    max_batch_rows: int
    microbatch_tokens: int
    """Number of tokens in each micro-batch of Rheostat's trainer."""
    trl_sequences: int
    """Number of sequences in each micro-batch of TRL's trainer."""
    reward_pattern: str
    """Regular expression that gives a completion the reward 1 if it matches.

    In most groups some random completions match and some do not, so that rewards in a group differ.
    """

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
    """Measure whole training iterations of Rheostat and TRL on one GPU, for each model size.

    Yields tables of seconds per stage, of the comparison with the GPU's limit, and of the comparison with TRL. Raises
    BadInput if there is no GPU.
    """
    scales = _scales(os.environ.get(SIZE_VARIABLE))
    configured = os.environ.get(VLLM_VARIABLE)
    python = find_python("vllm", Path(configured) if configured else None)
    for scale in scales:
        yield from _measured(scale, python)


def _scales(size: str | None) -> tuple[Scale, ...]:
    if size not in (None, "tiny"):
        raise BadInput(f"{SIZE_VARIABLE}: expected tiny or no value, found {size!r}")
    if size == "tiny":
        return (DRY,)
    if not has_gpu():
        raise BadInput(
            f"the part gpu needs a CUDA GPU, but there is none. Set {SIZE_VARIABLE}=tiny to try it on a CPU."
        )
    return SCALES


def _measured(scale: Scale, python: Path) -> Iterator[Table]:
    """Measure one model size: a job of Rheostat, then TRL with the same completion lengths. Yield three tables.

    `python` is the interpreter of vLLM's environment.
    """
    found = measure_device(scale.dtype, threads=1)
    device = Device(flops=found.flops, bandwidth=found.bandwidth)
    share = server_share(found.memory, scale.decoder)
    with tempfile.TemporaryDirectory(prefix="rheostat-bench-") as name:
        directory = Path(name)
        write_decoder(directory / "policy", scale.decoder, dtype=scale.dtype)
        prompts = _write_problems(directory, scale)
        config = directory / "config.toml"
        config.write_text(config_of(directory, scale, python=python, share=share, cuda=found.cuda))
        with run_job_to_end(config) as job:
            iterations = read_iterations(job.run)
            made = [read_lengths(job.run, number + 1) for number in range(ITERATIONS)]
        limits = [
            compute_limit(one, scale.decoder, device, bytes_per_weight=BYTES[scale.dtype], steps=MINIBATCHES)
            for one in made
        ]
        taken = [MeasuredIteration(*one) for one in list(zip(iterations, made, limits, strict=True))[SETTLED:]]
        yield seconds_per_stage(taken, scale.decoder)
        yield compare_with_limit(taken, scale.decoder, found)
        yield compare_with_trl(
            taken, _trl(scale, directory, prompts, workloads=made, share=share, device=found), scale.decoder, found
        )


def server_share(memory: int, decoder: Decoder) -> float:
    """Return the share of the GPU's memory that the vLLM server may use, so that the trainer's state fits next to it.

    `memory` is the GPU's memory in bytes, or 0 without a GPU. Raises BadInput if the GPU's memory is too small.
    """
    if not memory:
        return 0.85
    share = (memory - STATE_BYTES * decoder.parameters - MARGIN_BYTES) / memory
    if share < 0.1:
        raise BadInput(f"{decoder.name} needs a GPU with more than {memory / 2**30:.0f} GiB of memory")
    return round(min(0.85, share), 2)


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
    """Return the TOML configuration of a job with one rollout worker and one update rank, which take turns on the GPU.

    `directory` contains the policy and prompts, `python` is vLLM's interpreter, and `share` is the server's share of
    the GPU's memory.
    """
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
    scale: Scale,
    directory: Path,
    prompts: tuple[str, ...],
    *,
    workloads: list[Generated],
    share: float,
    device: DeviceSpeed,
) -> list[TrlIteration]:
    """Run the same iterations in TRL's trainer and return their times without the first ones.

    `workloads` contains the completion lengths of Rheostat's iterations, and `share` is vLLM's share of the GPU's
    memory. Returns an empty list if TRL's environment does not exist.
    """
    configured = os.environ.get(TRL_VARIABLE)
    python = Path(configured) if configured else Path(f"{sys.prefix}-trl") / "bin" / "python"
    if not python.exists():
        sys.stderr.write(f"TRL is not measured, because {python} does not exist. `make bench-gpu` installs it.\n")
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
            lengths=tuple(tuple(length for _, length in one.contexts) for one in workloads),
        ),
    )
    with start_trl(python, workload, directory / "trl.json") as take_block:
        return take_block()[SETTLED:]
