"""From an engine's configuration to the engine."""

from typing import assert_never

from models.config import EngineConfig, PacedEngine, TransformersEngine
from models.engines import Engine


def build_engine(config: EngineConfig) -> Engine:
    """Make an engine without weights."""
    match config:
        case TransformersEngine():
            from models.engines.transformers import HuggingFaceEngine  # torch: only workers that run models pay for it

            return HuggingFaceEngine(config)
        case PacedEngine():
            from models.engines.paced import PacedEngine as Paced

            return Paced(config)
        case _:
            assert_never(config)
