"""What every rollout engine is: weights in, completions out. Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from models.config import SamplingConfig
from models.records import FinishReason


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and the seeds of the completions that are wanted of it."""

    row: int
    """Row of the prompt in its shard; names the prompt in messages."""
    tokens: tuple[int, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """What the policy answered: its tokens, how likely each was, and why it ended."""

    tokens: tuple[int, ...]
    """Ends with an EOS token, or with the token that completed a stop text, when the reason is `stop`."""
    logprobs: tuple[float, ...]
    """float32 values, one per token: log-softmax at the sampling temperature (at 1 when greedy), untruncated."""
    text: str
    """The tokens' text without special tokens."""
    finish_reason: FinishReason


class Engine(Protocol):
    """Generates with the weights it loaded last.

    `progress` moves while work advances. The same weights, requests and sampling give the same completions, whatever
    the engine did before.
    """

    progress: int

    def load(self, directory: Path, digest: str) -> None:
        """Take the policy in `directory`, whose files were verified to be those of `digest`."""

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[list[Completion]]:
        """Return one list per request, with one completion per seed, in order."""
