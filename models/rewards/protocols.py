"""What can be put in from outside: the shapes that built-ins and users' own code fit alike."""

from collections.abc import Iterable
from typing import Protocol


class Reward(Protocol):
    """Judge one completion; higher is better, and the same arguments give the same number.

    To raise, to hang or to return anything but a finite number makes the score missing, never 0.
    """

    def __call__(self, prompt: str, completion: str, answer: str, /) -> float:
        """Return the reward of a completion, given the reference answer (empty where the data has none)."""
        ...


class StepReward(Protocol):
    """Judge a completion step by step: as many numbers as steps, which concatenated are the completion."""

    def __call__(self, prompt: str, completion: str, answer: str, /, *, steps: list[str]) -> Iterable[float]:
        """Return the value of each step; a step is never empty, unless the completion is."""
        ...


class TokenReward(Protocol):
    """Judge a completion token by token: as many numbers as tokens, which concatenated are the completion."""

    def __call__(self, prompt: str, completion: str, answer: str, /, *, tokens: list[str]) -> Iterable[float]:
        """Return the value of each token; EOS, and tokens that do not finish a character, are empty texts."""
        ...
