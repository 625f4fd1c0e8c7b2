"""Records of replays, which send the stored turns of episodes to new environments and compare the answers."""

from dataclasses import dataclass
from pathlib import Path

from rheostat.infra.config import Settings
from rheostat.infra.store.shards import ShardRef
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.config.environments import EnvironmentConfig


@dataclass(frozen=True, slots=True)
class ReplayWork:
    """Request to replay stored episodes: new environments answer the stored turns of the policy, and their answers are
    compared with the stored ones."""

    run_uri: str
    """Location of the run's store: a path or a URL."""
    environment: EnvironmentConfig
    sampling: SamplingConfig
    policy: Path
    """Directory of a policy of the run, from which the tokenizer is loaded."""
    prompts: ShardRef
    episodes: tuple[tuple[ShardRef, int], ...]
    """Episodes to replay, each given by its rollout shard and its row number in the shard."""


class Difference(Settings):
    """Difference between the environment's stored answer to a turn and its answer in a replay."""

    shard: str
    """Key of the rollout shard."""
    row: int
    """Row number in the shard, from 0."""
    turn: int
    """Number of the turn, from 1. The number 0 stands for the environment's observation before the first turn."""
    expected: str
    """Stored answer of the environment, shortened."""
    found: str
    """Answer of the environment in the replay, shortened in the same way."""

    def line(self) -> str:
        """Return the difference as one line of text for messages: the episode, the turn and both answers."""
        turn = f"turn {self.turn}" if self.turn else "before its first turn"
        return f"{self.shard}: row {self.row}, {turn}: expected {self.expected}, found {self.found}"
