"""GPUs of a run, and the check that an update rank fits next to an awake inference server on the same GPU.

The rank keeps its weights, gradients and optimizer state on the GPU while workers generate. A server that reserves a
share of the GPU's memory must leave enough for them.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from rheostat.infra.pools.gpu_layout import GpuLayout
from rheostat.models.config.conflicts import slot_engines
from rheostat.models.config.engines import BYTES, EngineSettings
from rheostat.models.config.objectives import UpdateConfig
from rheostat.tasks.config.run import RunConfig

FREED_PARTS: Final = ("activations", "head", "writing", "gathered")
"""Parts of a rank's peak memory that are needed only during an update. `freed_parts` adds the buckets of DeepSpeed."""
CUDA_BYTES: Final = 2.0**30
"""Estimated bytes of the CUDA context of a process, with the workspaces of its libraries."""
NCCL_BYTES: Final = 2.0**30
"""Estimated bytes of the buffers of NCCL, if there are several ranks."""
BUCKET_NUMBERS: Final = 500_000_000
"""Size of the buffer in which DeepSpeed reduces gradients (`reduce_bucket_size`), in numbers."""
GATHERED_NUMBERS: Final = 1_000_000_000
"""Largest number of weights that are gathered at once under ZeRO-3 (`max_live_parameters` of DeepSpeed)."""


def gpu_layout(config: RunConfig) -> GpuLayout:
    """Return how the worker slots and the update ranks of a run use GPUs."""
    return GpuLayout.of(config.pools, ranks_per_node=config.update.sequence_parallel)


def find_default_float32(config: RunConfig) -> str | None:
    """Return a note about the cost of float32 on GPUs, if the update or the rollout engine uses it on GPUs because
    `dtype` is not set. Return None for text-to-image policies, whose log-probs are too inexact in bfloat16."""
    pools, engine = config.pools, config.rollout.engine
    uses_gpus = {
        "update.dtype": (config.update, pools.gpus_per_update_rank),
        "rollout.engine.dtype": (engine, 0 if getattr(engine, "base_urls", ()) else pools.gpus_per_worker),
    }
    keys = [
        key
        for key, (settings, gpus) in uses_gpus.items()
        if gpus and getattr(settings, "dtype", None) == "float32" and "dtype" not in settings.model_fields_set
    ]
    if not keys or config.policy.generates_images:
        return None
    advice = " and ".join(f"{key} = 'bfloat16'" for key in keys)
    return (
        f"{' and '.join(keys)} {'is' if len(keys) == 1 else 'are'} 'float32', the default. On GPUs, bfloat16 needs "
        "half the memory for weights, activations and cache, and its matrix products are up to 15 times as fast. Set "
        f"{advice}, or set 'float32' to remove this note."
    )


def library_bytes(update: UpdateConfig, facts: Mapping[str, float], *, ranks: int, on_gpu: bool) -> dict[str, float]:
    """Return the bytes that libraries need in an update rank, by purpose: for CUDA and NCCL, for the buckets in which
    DeepSpeed reduces gradients, and for the weights that ZeRO-3 gathers. `facts` are the numbers of the preflight
    check.

    On a CPU, a bucket takes only the memory that gradients are written to. On a GPU, it takes its whole size.
    """
    stage, number = update.running_stage, BYTES[update.dtype]
    sizes = {"update_cuda_bytes": CUDA_BYTES + (NCCL_BYTES if ranks > 1 else 0)} if on_gpu else {}
    if stage:
        written = BUCKET_NUMBERS if on_gpu else min(BUCKET_NUMBERS, facts.get("trained_parameters", 0.0))
        sizes["update_buckets_bytes"] = written * number
    if stage == 3:
        largest = max(facts.get(f"{model}parameters", 0.0) for model in ("", "critic_", "teacher_"))
        sizes["update_gathered_bytes"] = min(GATHERED_NUMBERS, largest) * number
    return sizes


def freed_parts(update: UpdateConfig) -> tuple[str, ...]:
    """Return the parts of a rank's peak memory that are free, or not on the GPU, between updates. Under ZeRO-3,
    DeepSpeed keeps its buckets."""
    return FREED_PARTS if update.shards_weights else (*FREED_PARTS, "buckets")


def kept_rank_bytes(config: RunConfig, facts: Mapping[str, float]) -> float:
    """Return the estimated bytes that an idle update rank keeps on its GPU. `facts` are the numbers of the preflight
    check."""
    update = config.update
    freed = (*freed_parts(update), *update.offloaded)
    sizes = {**facts, **library_bytes(update, facts, ranks=config.pools.update_ranks, on_gpu=True)}
    parts = {f"update_{part}_bytes" for part in freed}
    names = [name for name in sizes if name.startswith("update_") and name.endswith("_bytes")]
    return sum(sizes[name] for name in names if name not in parts)


def find_memory_conflicts(config: RunConfig, facts: Mapping[str, float], memory: float) -> Iterator[str]:
    """Yield a message for each engine that leaves too little of a GPU with `memory` bytes to the update rank on the
    same GPU."""
    layout = gpu_layout(config)
    if not layout.shares_gpus:
        return
    kept = kept_rank_bytes(config, facts)
    for name, engine, slots in slot_engines(config.rollout, config.scoring):
        servers = _servers_per_gpu(config, slots)
        share = engine.reserved_memory_share()
        if share and servers * share * memory + kept > memory:
            yield _describe_conflict(name, engine, servers=servers, kept=kept, memory=memory)


def _servers_per_gpu(config: RunConfig, slots: int) -> int:
    return max(1, gpu_layout(config).max_slots_per_gpu(config.pools.workers.max) // slots)


def _describe_conflict(name: str, engine: EngineSettings, *, servers: int, kept: float, memory: float) -> str:
    share, free = engine.reserved_memory_share(), int((memory - kept) / memory / servers * 100) / 100  # rounded down
    several = f" ({servers} servers on each GPU)" if servers > 1 else ""
    remedy = (
        f"Set {name}.gpu_memory_share to at most {free:.2f}"
        if free >= 0.01
        else "Shard the update over more ranks (pools.update_ranks, update.zero_stage)"
    )
    return (
        f"{name}.gpu_memory_share is {share:g}{several}, but the update rank on the same GPU keeps about "
        f"{kept / 2**30:,.1f} of {memory / 2**30:,.1f} GiB while workers generate. {remedy}, or set "
        "pools.dedicated_update_resources = true"
    )
