"""One record per kind of work that a stage asks of a worker."""

from dataclasses import dataclass

from infra.shards import ShardRef
from models.config import DataConfig, PolicyConfig, SamplingConfig, WarmupConfig
from models.records import PolicyVersion


@dataclass(frozen=True, slots=True)
class PolicyWork:
    """Make the policy that everything starts from: build it and train its tokenizer, or import it."""

    policy: PolicyConfig
    data: DataConfig
    seed: int


@dataclass(frozen=True, slots=True)
class PromptWork:
    """Render and tokenize a data set's split (`train` or `heldout`) into one prompts shard."""

    data: DataConfig
    split: str
    policy: PolicyVersion
    seed: int
    max_new_tokens: int
    """Room that completions need; a prompt that leaves less in the policy's context is bad input."""


@dataclass(frozen=True, slots=True)
class RolloutWork:
    """Generate `group_size` completions for each of the named prompts: one shard."""

    iteration: int
    policy: PolicyVersion
    prompts: ShardRef
    rows: tuple[int, ...]
    group_size: int
    sampling: SamplingConfig
    seed: int


@dataclass(frozen=True, slots=True)
class ScoringWork:
    """Score every completion of one rollout shard: one shard of the same order."""

    iteration: int
    rollouts: ShardRef


@dataclass(frozen=True, slots=True)
class CreditWork:
    """Turn an iteration's rollouts and scores (paired, in order) into training samples."""

    iteration: int
    rollouts: tuple[ShardRef, ...]
    scores: tuple[ShardRef, ...]


@dataclass(frozen=True, slots=True)
class UpdateWork:
    """Take the optimizer steps of one iteration; every rank gets the same record and reads its own rows."""

    iteration: int
    policy: PolicyVersion
    reference: PolicyVersion
    samples: tuple[ShardRef, ...]
    total_iterations: int
    seed: int


@dataclass(frozen=True, slots=True)
class WarmupWork:
    """Train a policy on worked examples before the first iteration; every rank gets the same record."""

    policy: PolicyVersion
    data: DataConfig
    warmup: WarmupConfig
    seed: int
