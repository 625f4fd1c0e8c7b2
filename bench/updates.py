"""Updates of one rank by the real update worker: seconds, utilization, memory and repeatability by attention.

Needs no network, Ray or Prefect. On a GPU the policy has the shape of Qwen3-0.6B, in bfloat16. Without a GPU the same
code runs with a tiny policy in float32, whose figures have no meaning. `BENCH_UPDATES_SIZE=tiny` chooses the tiny
policy on a GPU too.
"""

import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load_file
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity, profile

from bench.decoders import QWEN3_0_6B, TINY, Decoder, DType, write_decoder
from bench.device import measure_device, peak_flops
from bench.tables import Table
from rheostat.infra.store.bundles import fetch_bundle, publish_bundle
from rheostat.infra.store.shards import ShardRef, write_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.algorithms import Grpo
from rheostat.models.config.objectives import KlPenalty, UpdateConfig
from rheostat.models.inspection.memory import MicrobatchSizes, microbatch_bytes, resident_bytes
from rheostat.models.inspection.plain import DecoderSizes
from rheostat.models.records.schemas import SAMPLE_SCHEMA
from rheostat.models.records.versions import ModelVersion, Outcome
from rheostat.models.records.work import UpdateWork
from rheostat.models.workers.update import UpdateWorker
from rheostat.placement.roofline import Generated, compute_utilization, shared_flops

SIZE_VARIABLE = "BENCH_UPDATES_SIZE"
GROUP = 8
"""Completions of each prompt."""


@dataclass(frozen=True, slots=True)
class Size:
    """Policy and samples of the benchmark."""

    decoder: Decoder
    dtype: DType
    prompts: int
    prompt_tokens: int
    completion_tokens: int
    """Maximum length of a completion. Lengths are sampled uniformly from a quarter of it up to it."""
    microbatch_tokens: int


LARGE = Size(QWEN3_0_6B, "bfloat16", 16, 512, 1024, 16384)
SMALL = Size(TINY, "float32", 4, 16, 64, 1024)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compute the update."""

    name: str
    settings: dict[str, object]
    is_deterministic: bool = False
    is_repeated: bool = True
    """Whether the update is computed twice from the same policy, to compare the weights. The second one is timed."""


VARIANTS = (
    Variant("auto", {}),
    Variant("sdpa", {"attention": "sdpa"}),
    Variant("sdpa, deterministic kernels", {"attention": "sdpa"}, is_deterministic=True),
    Variant("auto, reference for KL", {"kl": KlPenalty(coefficient=0.01)}, is_repeated=False),
    Variant("auto, layers recomputed", {"activation_checkpointing": True}, is_repeated=False),
    Variant("auto, deterministic kernels", {}, is_deterministic=True),
    Variant("auto, ZeRO 3", {"zero_stage": 3}, is_repeated=False),  # last, because DeepSpeed then replaces F.linear
)


def measure() -> Iterator[Table]:
    """Measure an update of each variant."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic kernels of cuBLAS require
    has_gpu = torch.cuda.is_available()
    size = LARGE if has_gpu and os.environ.get(SIZE_VARIABLE) != "tiny" else SMALL
    device = measure_device(size.dtype, threads=1)
    peak = (peak_flops(device.name) if size.dtype == "bfloat16" else None) or device.flops
    with tempfile.TemporaryDirectory() as folder:
        uri = f"{folder}/store"
        write_decoder(Path(folder, "policy"), size.decoder, dtype=size.dtype)
        policy = ModelVersion(0, publish_bundle(open_store(f"{uri}/run"), Path(folder, "policy"), prefix="policies"))
        lengths, samples = _write_samples(uri, size)
        generated = Generated(prompts=(size.prompt_tokens,) * size.prompts, lengths=lengths)
        flops = 3 * shared_flops(size.decoder, generated)  # the backward pass takes twice the forward pass
        rows, slowest = [], _profile(uri, policy, samples, size)
        for variant in VARIANTS:
            rows.append(_measure_variant(uri, policy, samples, size, variant, flops=flops, peak=peak))
            sys.stderr.write(f"{rows[-1]}\n")
    yield Table(
        f"updates of a {size.decoder.name} policy in {size.dtype} on {device.name}: "
        f"{size.prompts * GROUP} completions, "
        f"{generated.trained_tokens:,} tokens, micro-batches of {size.microbatch_tokens:,} tokens",
        (
            "variant",
            "load s",
            "log-probs s",
            "steps s",
            "save s",
            "utilization",
            "peak GiB",
            "estimate GiB",
            "repeated",
        ),
        tuple(rows),
        (
            "utilization: floating-point operations of the steps (recomputed layers not counted) over the peak of the "
            "device",
            "repeated: distance between the weights of an update and of its repetition, over the length of the update",
        ),
    )
    yield slowest


def _measure_variant(
    uri: str,
    policy: ModelVersion,
    samples: ShardRef,
    size: Size,
    variant: Variant,
    *,
    flops: float,
    peak: float,
) -> tuple[str | float, ...]:
    """Return the row of one variant."""
    config = _build_config(size, variant)
    torch.use_deterministic_algorithms(variant.is_deterministic)
    outcomes = []
    try:
        for _ in range(1 + variant.is_repeated):
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            outcomes.append(_update(uri, config, policy, samples))
    finally:
        torch.use_deterministic_algorithms(False)
    used = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    seconds = outcomes[-1].timings
    return (
        variant.name,
        *(seconds.get(name, 0.0) for name in ("load", "logprobs", "steps", "save")),
        compute_utilization(flops, seconds["steps"], peak=peak),
        used,
        _estimate_bytes(config, size) / 2**30,
        _compare(uri, policy, *(outcome.model for outcome in outcomes)) if variant.is_repeated else "",
    )


def _build_config(size: Size, variant: Variant) -> UpdateConfig:
    """Return the configuration of a variant. Layers are not recomputed if the variant does not say so, because workers
    get the decision of the plan, which is not made here."""
    settings = {"activation_checkpointing": False, **variant.settings}
    return UpdateConfig(
        learning_rate=1e-4,
        minibatches=1,
        microbatch_tokens=size.microbatch_tokens,
        dtype=size.dtype,
        **settings,  # type: ignore[arg-type]
    )


def _profile(uri: str, policy: ModelVersion, samples: ShardRef, size: Size) -> Table:
    """Return the operations of one update that take most time, on the GPU if there is one. `launches` are calls."""
    has_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu else [])]
    with profile(activities=activities) as profiler:
        outcome = _update(uri, _build_config(size, VARIANTS[0]), policy, samples)

    def count_seconds(event: FunctionEventAvg) -> float:
        return (event.self_device_time_total if has_gpu else event.self_cpu_time_total) / 1e6

    events = sorted(profiler.key_averages(), key=count_seconds, reverse=True)
    total = sum(map(count_seconds, events))
    return Table(
        f"operations of an update with most time on the {'GPU' if has_gpu else 'CPU'}",
        ("operation", "launches", "seconds", "fraction"),
        tuple(
            (event.key[:70], event.count, count_seconds(event), count_seconds(event) / total) for event in events[:16]
        ),
        (f"all operations: {total:.2f} s, in an update whose steps took {outcome.timings['steps']:.2f} s",),
    )


def _update(uri: str, config: UpdateConfig, policy: ModelVersion, samples: ShardRef) -> Outcome:
    """Update the policy once in a new worker."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    worker = UpdateWorker(uri, "run", update=config, algorithm=Grpo(), temperature=1.0, denoising=None, threads=1)
    worker.join(0, 1, "127.0.0.1", port)
    work = UpdateWork(
        iteration=0,
        policy=policy,
        reference=policy,
        samples=(samples,),
        total_iterations=2,
        seed=0,
        kl_coefficient=0.01,
        keeps_state=False,
    )
    try:
        return worker.update(work)
    finally:
        worker.close()


def _estimate_bytes(config: UpdateConfig, size: Size) -> float:
    """Return the peak memory of the update as `rheostat plan` estimates it."""
    decoder = size.decoder
    sizes = DecoderSizes(
        "qwen3",
        decoder.vocabulary,
        decoder.hidden_size,
        decoder.intermediate_size,
        decoder.layers,
        decoder.heads,
        decoder.kv_heads,
        decoder.head_dim,
        decoder.context,
    )
    model, longest = sizes.outline(), size.prompt_tokens + size.completion_tokens
    held = resident_bytes(config, model, ranks=1)
    held.pop("trained_parameters")
    batch = MicrobatchSizes.compute(config, longest=longest, completions=size.prompts * GROUP, ranks=1)
    added = microbatch_bytes(config, model, batch, held=sum(held.values()))
    return sum(held.values()) + added["update_activations_bytes"] + added["update_head_bytes"]


def _compare(uri: str, start: ModelVersion, first: ModelVersion, second: ModelVersion) -> float:
    """Return the distance between two versions, divided by the distance of the first from the start."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    before, one, two = (
        load_file(fetch_bundle(open_store(f"{uri}/run"), version.weights) / "model.safetensors", device=device)
        for version in (start, first, second)
    )
    moved = sum(float((one[name].float() - each.float()).square().sum()) for name, each in before.items())
    apart = sum(float((one[name].float() - each.float()).square().sum()) for name, each in two.items())
    return float((apart / moved) ** 0.5)


def _write_samples(uri: str, size: Size) -> tuple[tuple[tuple[int, ...], ...], ShardRef]:
    """Write random samples. Return the lengths of the completions of each prompt in tokens, and the shard."""
    rng, rows, lengths = np.random.default_rng(0), [], []
    for prompt in range(size.prompts):
        shared = rng.integers(2, size.decoder.vocabulary, size.prompt_tokens).tolist()
        drawn = rng.integers(size.completion_tokens // 4, size.completion_tokens + 1, GROUP).tolist()
        lengths.append(tuple(drawn))
        for sample, length in enumerate(drawn):
            rows.append(
                {
                    "prompt_row": prompt,
                    "sample": sample,
                    "tokens": shared + rng.integers(2, size.decoder.vocabulary, length).tolist(),
                    "num_prompt_tokens": len(shared),
                    "logprobs": (-np.log(size.decoder.vocabulary) + 0.1 * rng.normal(size=length)).tolist(),
                    "advantages": [float(rng.normal())] * length,
                    "staleness": [0] * length,
                }
            )
    table = pa.Table.from_pylist(rows, SAMPLE_SCHEMA)
    shard = write_shard(open_store(f"{uri}/run"), table, kind="samples", metadata={})
    return tuple(lengths), shard
