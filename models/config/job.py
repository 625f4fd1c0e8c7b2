"""Facts about a job on which the conflicts of its algorithm, loss, engine and other variants depend. Torch-free.

The classes of a run's configuration implement these protocols. Variants are written against them, so that their
modules do not import each other in a circle.
"""

from collections.abc import Sequence
from typing import Protocol

from rheostat.infra.config import PoolsConfig
from rheostat.infra.variants import Variant
from rheostat.models.config.divergence import KlPenalty
from rheostat.models.config.lora import LoraConfig
from rheostat.models.config.reward_terms import RewardTerm


class SamplingFacts(Protocol):
    """Settings for sampling completions. `rheostat.models.config.engines.SamplingConfig` implements it."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def max_new_tokens(self) -> int: ...


class EngineFacts(Protocol):
    """Settings of an inference engine. `rheostat.models.config.engines.EngineSettings` implements it."""

    @property
    def label(self) -> str: ...
    @property
    def interleaves_episodes(self) -> bool: ...


class RolloutFacts(Protocol):
    """Settings of the rollout. `rheostat.models.config.rollout.RolloutConfig` implements it."""

    @property
    def engine(self) -> EngineFacts: ...
    @property
    def group_size(self) -> int: ...
    @property
    def sampling(self) -> SamplingFacts: ...
    @property
    def dynamic(self) -> object | None: ...
    @property
    def partial(self) -> object | None: ...


class CorrectionFacts(Protocol):
    """Settings of an importance correction. `rheostat.models.config.objectives.Correction` implements it."""

    @property
    def compares_with_trainer(self) -> bool: ...


class UpdateFacts(Protocol):
    """Settings of the update. `rheostat.models.config.objectives.UpdateConfig` implements it."""

    @property
    def minibatches(self) -> int: ...
    @property
    def epochs(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def zero_stage(self) -> int: ...
    @property
    def running_stage(self) -> int: ...
    @property
    def lora(self) -> LoraConfig | None: ...
    @property
    def loss(self) -> Variant: ...
    @property
    def kl_penalty(self) -> KlPenalty | None: ...
    @property
    def correction(self) -> CorrectionFacts: ...
    @property
    def corrections(self) -> Sequence[CorrectionFacts]: ...
    @property
    def router_replay(self) -> str | None: ...


class ScoringFacts(Protocol):
    """Settings of the rewards. `rheostat.models.config.rewards.ScoringConfig` implements it."""

    @property
    def rewards(self) -> Sequence[RewardTerm]: ...
    @property
    def terms(self) -> Sequence[str]: ...
    @property
    def outcome_weight(self) -> float: ...
    @property
    def process_weight(self) -> float: ...
    @property
    def has_feedback(self) -> bool: ...


class AlgorithmFacts(Protocol):
    """Settings of the algorithm. `rheostat.models.config.algorithms.Algorithm` implements it."""

    @property
    def overlong(self) -> object | None: ...
    @property
    def distillation(self) -> object | None: ...


class Job(Protocol):
    """Parts of a run's configuration whose settings must fit together. Each variant checks its settings against them.
    `rheostat.models.config.conflicts.JobParts` implements it."""

    @property
    def algorithm(self) -> AlgorithmFacts: ...
    @property
    def update(self) -> UpdateFacts: ...
    @property
    def rollout(self) -> RolloutFacts: ...
    @property
    def scoring(self) -> ScoringFacts: ...
    @property
    def pools(self) -> PoolsConfig: ...
    @property
    def iterations(self) -> int: ...
