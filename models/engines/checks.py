"""Whether an engine can run here: its environment is on this machine, and the policy fits it. Torch-free."""

from collections.abc import Iterator
from typing import Final

from infra.config import PoolsConfig
from infra.environments.find import Platform, find_environment
from infra.errors import BadInput
from models.config.engines import CPU_CACHE_GIB, EngineConfig, PacedEngine, TransformersEngine, VllmEngine
from models.config.judges import EndpointJudge, JudgeReward
from models.config.rewards import ScoringConfig
from models.config.rollout import RolloutConfig
from models.records.versions import ModelShape

INSTALL: Final = {
    "cpu": "`rheostat engine install vllm --platform cpu` makes one, give its Python as {name}.python; or set "
    "pools.gpus_per_worker",
    "cuda": "set pools.gpus_per_worker=0, or install where the NVIDIA driver is",
}


def check_environments(rollout: RolloutConfig | None, *, scoring: ScoringConfig, pools: PoolsConfig) -> None:
    """Refuse an engine whose environment is not there, does not import, or was built for other workers.

    Those of a cluster that runs elsewhere are looked for there, by its workers.
    """
    if pools.ray_address is not None:
        return
    for name, engine, slots in slot_engines(rollout, scoring):
        if isinstance(engine, VllmEngine) and not engine.base_urls:
            _check(engine, name=name, expected="cuda" if slots * pools.gpus_per_worker else "cpu")


def slot_engines(rollout: RolloutConfig | None, scoring: ScoringConfig) -> Iterator[tuple[str, EngineConfig, int]]:
    """Name every engine of the worker slots, and the slots that one of it takes."""
    if rollout is not None:
        yield "rollout.engine", rollout.engine, 1
    for term, reward in scoring.local.items():
        if isinstance(reward, JudgeReward) and not isinstance(reward.model, EndpointJudge):
            yield f"reward {term!r}: model.engine", reward.model.engine, reward.slots


def _check(engine: VllmEngine, *, name: str, expected: Platform) -> None:
    try:
        found = find_environment(engine.kind, engine.python)
    except BadInput as error:
        raise BadInput(f"{name}.kind {engine.kind!r}: {error}") from error
    if found.platform != expected:
        workers = (
            "workers with GPUs need one for cuda" if expected == "cuda" else "workers without GPUs need one for cpu"
        )
        raise BadInput(
            f"{name}.kind {engine.kind!r}: the environment of {found.python} is for {found.platform}, {workers}; "
            f"{INSTALL[expected].format(name=name)}"
        )


BYTES: Final = {"float32": 4, "bfloat16": 2}

GIB: Final = 2**30

CPU_HEAD_SIZES: Final = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""vllm.v1.attention.backends.cpu_attn of vLLM 0.32; with another its engine dies at the first request."""


def check_engine(
    engine: EngineConfig, shape: ModelShape, *, longest: int, gpus: float, name: str = "rollout.engine"
) -> dict[str, float]:
    """Estimate the bytes of weights and cache per worker. Raises BadInput where the engine cannot serve the model.

    A cache that grows with its rows is counted full. Of a server elsewhere nothing is counted, and no cache where that
    takes what a GPU has left.
    """
    match engine:
        case PacedEngine():
            return {"rollout_weights_bytes": 0, "rollout_cache_bytes": 0}
        case TransformersEngine():
            cache = _token_bytes(engine, shape) * engine.max_batch_rows * longest
            return {"rollout_weights_bytes": _weights_bytes(engine, shape), "rollout_cache_bytes": cache}
        case VllmEngine():
            return _check_vllm(engine, shape, longest=longest, gpus=gpus, name=name)


def _check_vllm(engine: VllmEngine, shape: ModelShape, *, longest: int, gpus: float, name: str) -> dict[str, float]:
    length = engine.max_model_len or shape.context
    if length < longest:
        raise BadInput(
            f"{name}.max_model_len {length}: the longest prompt and completion have {longest} tokens together"
        )
    if length > shape.context:
        raise BadInput(f"{name}.max_model_len {length}: the model's context is {shape.context} tokens")
    if engine.base_urls:
        return {"rollout_weights_bytes": 0, "rollout_cache_bytes": 0}
    if not gpus and shape.head_size not in CPU_HEAD_SIZES:
        raise BadInput(
            f"{name}.kind 'vllm' on a CPU: the model's heads have {shape.head_size} numbers, expected one of "
            f"{', '.join(map(str, CPU_HEAD_SIZES))}; change its heads or hidden_size, or use {name}.kind='transformers'"
        )
    gib = engine.cache_gib or (None if gpus else CPU_CACHE_GIB)
    weights: dict[str, float] = {"rollout_weights_bytes": _weights_bytes(engine, shape)}
    if gib is None:
        return weights
    needed = _token_bytes(engine, shape) * length
    if gib * GIB < needed:
        raise BadInput(
            f"{name}.cache_gib {gib:g}: one sequence of {length} tokens takes {needed / GIB:.3g} GiB; raise it, or "
            f"lower {name}.max_model_len"
        )
    return weights | {"rollout_cache_bytes": int(gib * GIB)}


def _weights_bytes(engine: TransformersEngine | VllmEngine, shape: ModelShape) -> int:
    return shape.parameters * BYTES[engine.dtype]


def _token_bytes(engine: TransformersEngine | VllmEngine, shape: ModelShape) -> int:
    """Keys and values of one token."""
    return 2 * shape.layers * shape.kv_heads * shape.head_size * BYTES[engine.dtype]
