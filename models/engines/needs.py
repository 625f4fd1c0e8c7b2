"""Whether the environments of a run's engines are on this machine. Torch-free."""

from collections.abc import Iterator
from typing import Final

from infra.config import PoolsConfig
from infra.environments.find import Platform, find_environment
from infra.errors import BadInput
from models.config import EngineConfig, RolloutConfig, VllmEngine
from models.rewards.config import EndpointJudge, JudgeReward, ScoringConfig

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
