"""Records of episodes that are played again: which ones, and what is another then."""

from dataclasses import dataclass
from pathlib import Path

from infra.config import Settings
from infra.store.shards import ShardRef
from models.config.engines import SamplingConfig
from models.config.environments import EnvironmentConfig


@dataclass(frozen=True, slots=True)
class ReplayWork:
    """Have new environments answer the stored turns of some episodes."""

    run_uri: str
    """Where the run lies."""
    environment: EnvironmentConfig
    sampling: SamplingConfig
    policy: Path
    """Directory of a policy of the run, for its tokenizer."""
    prompts: ShardRef
    episodes: tuple[tuple[ShardRef, int], ...]
    """Shards of rollouts, and a row of each."""


class Difference(Settings):
    """A turn that was answered otherwise than its shard says."""

    shard: str
    """Key of the shard of rollouts."""
    row: int
    """Of the shard, from 0."""
    turn: int
    """From 1; 0 is what the environment said before the first."""
    expected: str
    """What the shard holds, shortened."""
    found: str
    """What came, shortened alike."""

    def line(self) -> str:
        """Say it in a line."""
        turn = f"turn {self.turn}" if self.turn else "before its first turn"
        return f"{self.shard}: row {self.row}, {turn}: expected {self.expected}, found {self.found}"
