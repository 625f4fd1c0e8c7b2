"""What can be put in from outside: the shapes that built-ins and users' own code fit alike."""

from typing import Protocol


class Reward(Protocol):
    """Judge one completion; higher is better, and the same arguments give the same number.

    To raise, to hang or to return anything but a finite number makes the score missing, never 0.
    """

    def __call__(self, prompt: str, completion: str, answer: str, /) -> float:
        """Return the reward of a completion, given the reference answer (empty where the data has none)."""
        ...
