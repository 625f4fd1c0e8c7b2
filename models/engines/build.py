"""From an engine's configuration to the engine."""

from typing import assert_never

from models.config.engines import EngineConfig, PacedEngine, TransformersEngine, VllmEngine
from models.engines.protocol import Engine


def build_engine(config: EngineConfig, *, adapter_rank: int = 0) -> Engine:
    """Make an engine without weights; `adapter_rank` is the largest of the adapters that it will load."""
    match config:
        case TransformersEngine():
            from models.engines.local.engine import HuggingFaceEngine  # torch: only workers that run models pay for it

            return HuggingFaceEngine(config)
        case PacedEngine():
            from models.engines.paced import Paced as Paced

            return Paced(config)
        case VllmEngine():
            from models.engines.vllm.engine import ServedEngine

            return ServedEngine(config, adapter_rank=adapter_rank)
        case _:
            assert_never(config)
