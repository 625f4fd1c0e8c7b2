"""Reward for the length of a list. A demo of preferences uses two such rewards, which prefer different lengths."""

from typing import Final

RANGE: Final = 14
"""Scale of the reward, in words: at this distance from the preferred length the reward is −`factor`."""


def near(prompt: str, completion: str, answer: str, *, items: int, factor: float) -> float:
    """Return −factor ((n − items) / 14)² for a completion of n words: 0 at the preferred length, else negative."""
    return -factor * ((len(completion.split()) - items) / RANGE) ** 2
