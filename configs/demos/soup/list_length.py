"""Reward for the length of a list. The job has two such rewards, which prefer different lengths."""

from typing import Final

RANGE: Final = 14
"""Distance from the preferred length, in words, at which the reward is −`factor`."""


def near(prompt: str, completion: str, answer: str, *, items: int, factor: float) -> float:
    """Return −factor ((n − items) / 14)² for a completion of n words. The reward is 0 at the preferred length of
    `items` words, and negative otherwise."""
    return -factor * ((len(completion.split()) - items) / RANGE) ** 2
