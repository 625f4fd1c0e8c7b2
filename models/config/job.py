"""What a variant may look at to say whether it fits in. Torch-free."""

from collections.abc import Iterator
from dataclasses import dataclass

from infra.config import PoolsConfig
from models.config.algorithms import Algorithm
from models.config.engines import EngineSettings
from models.config.objectives import UpdateConfig
from models.config.rewards import ScoringConfig
from models.config.rollout import RolloutConfig


@dataclass(frozen=True, slots=True)
class Job:
    """The parts of a run's configuration on which it depends whether its variants go together."""

    algorithm: Algorithm
    update: UpdateConfig
    rollout: RolloutConfig
    scoring: ScoringConfig
    pools: PoolsConfig
    iterations: int


def slot_engines(rollout: RolloutConfig | None, scoring: ScoringConfig) -> Iterator[tuple[str, EngineSettings, int]]:
    """Name every engine of the worker slots, and the slots that one of it takes."""
    if rollout is not None:
        yield "rollout.engine", rollout.engine, 1
    for term, reward in scoring.hosted_rewards.items():
        if reward.engine is not None:
            yield f"reward {term!r}: model.engine", reward.engine, reward.slots
