"""What a variant may look at to say whether it fits in. Torch-free."""

from dataclasses import dataclass

from infra.config import PoolsConfig
from models.config.algorithms import Algorithm
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
