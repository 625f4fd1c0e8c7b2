"""From an engine's configuration to the engine."""

from typing import cast

from infra.errors import BadInput
from infra.variants import check_implementation, implementation_of
from models.config.engines import EngineSettings
from models.engines.protocol import Engine, EngineMaker

METHODS = ("producer", "load", "serves", "sleep", "close", "steps", "likelihoods", "generate")
"""What an engine must be able to do."""


def build_engine(config: EngineSettings, *, adapter_rank: int = 0) -> Engine:
    """Make an engine without weights; `adapter_rank` is the largest of the adapters that it will load."""
    return cast(EngineMaker, implementation_of(config))(config, adapter_rank=adapter_rank)


def check_implemented(config: EngineSettings, *, name: str) -> None:
    """Raise BadInput unless the engine's class can be imported, made, and asked for all that engines do.

    Of our own that is known, and importing them takes seconds.
    """
    if not config.ships_with("models"):
        check_class(config, name=name)


def check_class(config: EngineSettings, *, name: str) -> None:
    """Import the engine's class and check it."""
    check_implementation(config, "settings", where=name, named=("adapter_rank",))
    found = implementation_of(config)
    lacking = [method for method in METHODS if not callable(getattr(found, method, None))]
    if isinstance(found, type) and lacking:
        raise BadInput(
            f"{name} {config.known_as!r}: expected {config.implementation!r} to have {', '.join(METHODS)}, "
            f"found no {', '.join(lacking)}"
        )
