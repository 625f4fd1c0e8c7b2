"""What tasks need to know of a run's configuration."""

from typing import Protocol

from infra.config import PoolsConfig
from models.algorithms.config import AlgorithmConfig
from models.config import (
    DataConfig,
    DpoConfig,
    EvaluationConfig,
    PolicyConfig,
    PreferencesConfig,
    RetentionConfig,
    RolloutConfig,
    WarmupConfig,
)
from models.objectives.config import UpdateConfig
from models.rewards.config import ScoringConfig
from placement.config import PlacementConfig


class RunSettings(Protocol):
    """What tasks need to know of a run's configuration."""

    @property
    def seed(self) -> int: ...
    @property
    def iterations(self) -> int: ...
    @property
    def data(self) -> DataConfig: ...
    @property
    def policy(self) -> PolicyConfig: ...
    @property
    def warmup(self) -> WarmupConfig | None: ...
    @property
    def preferences(self) -> PreferencesConfig | None: ...
    @property
    def dpo(self) -> DpoConfig | None: ...
    @property
    def rollout(self) -> RolloutConfig: ...
    @property
    def scoring(self) -> ScoringConfig: ...
    @property
    def algorithm(self) -> AlgorithmConfig: ...
    @property
    def update(self) -> UpdateConfig: ...
    @property
    def pools(self) -> PoolsConfig: ...
    @property
    def placement(self) -> PlacementConfig: ...
    @property
    def evaluation(self) -> EvaluationConfig: ...
    @property
    def retention(self) -> RetentionConfig: ...
