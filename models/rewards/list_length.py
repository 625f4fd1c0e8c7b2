"""Reward for the length of a list. A demo of preferences uses two such rewards, which prefer different lengths."""

from typing import Final

RANGE: Final = 14
"""Number of words by which the deviation from the preferred length is divided."""


def near(prompt: str, completion: str, answer: str, *, items: int, factor: float) -> float:
    """Return −factor ((n − items) / 14)² for a completion of n words: 0 at the preferred length, else negative."""
    return -factor * ((len(completion.split()) - items) / RANGE) ** 2
