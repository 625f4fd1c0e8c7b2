"""Records of replays, which send the stored turns of episodes to new environments and compare the answers."""

from dataclasses import dataclass
from pathlib import Path

from infra.config import Settings
from infra.store.shards import ShardRef
from models.config.engines import SamplingConfig
from models.config.environments import EnvironmentConfig


@dataclass(frozen=True, slots=True)
class ReplayWork:
    """Request to replay stored episodes: new environments answer the stored turns, and the answers are compared."""

    run_uri: str
    """Location of the run's store: a path or a URL."""
    environment: EnvironmentConfig
    sampling: SamplingConfig
    policy: Path
    """Directory of a policy of the run, which provides the tokenizer."""
    prompts: ShardRef
    episodes: tuple[tuple[ShardRef, int], ...]
    """Episodes, each as a rollout shard and a row number in it."""


class Difference(Settings):
    """Difference between the stored answer to a turn and the new answer in a replay."""

    shard: str
    """Key of the rollout shard."""
    row: int
    """Row number in the shard, from 0."""
    turn: int
    """Turn number, from 1. 0 is the observation before the first turn."""
    expected: str
    """Answer that is stored with the episode, shortened."""
    found: str
    """New answer, shortened in the same way."""

    def line(self) -> str:
        """Return the difference as one line of text."""
        turn = f"turn {self.turn}" if self.turn else "before its first turn"
        return f"{self.shard}: row {self.row}, {turn}: expected {self.expected}, found {self.found}"
