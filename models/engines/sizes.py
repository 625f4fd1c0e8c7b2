"""What an engine holds of a policy, and whether the policy fits it. Torch-free."""

from typing import TYPE_CHECKING, Final

from infra.errors import BadInput
from models.config import CPU_CACHE_GIB, EngineConfig, PacedEngine, TransformersEngine, VllmEngine

if TYPE_CHECKING:
    from models.roles.policy import PolicyShape

BYTES: Final = {"float32": 4, "bfloat16": 2}
GIB: Final = 2**30
CPU_HEAD_SIZES: Final = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""vllm.v1.attention.backends.cpu_attn of vLLM 0.32; with another its engine dies at the first request."""


def check_engine(
    engine: EngineConfig, shape: "PolicyShape", *, longest: int, gpus: float, name: str = "rollout.engine"
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


def _check_vllm(engine: VllmEngine, shape: "PolicyShape", *, longest: int, gpus: float, name: str) -> dict[str, float]:
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


def _weights_bytes(engine: TransformersEngine | VllmEngine, shape: "PolicyShape") -> int:
    return shape.parameters * BYTES[engine.dtype]


def _token_bytes(engine: TransformersEngine | VllmEngine, shape: "PolicyShape") -> int:
    """Keys and values of one token."""
    return 2 * shape.layers * shape.kv_heads * shape.head_size * BYTES[engine.dtype]
