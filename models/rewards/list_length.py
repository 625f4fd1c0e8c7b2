"""Reward for the length of a list, for the demo of preferences, in which two rewards prefer different lengths."""

from typing import Final

RANGE: Final = 14
"""Scale of the deviation from the preferred length, in words."""


def near(prompt: str, completion: str, answer: str, *, items: int, factor: float) -> float:
    """Return −factor ((n − items) / 14)² for a completion of n words: 0 at the preferred length, else negative."""
    return -factor * ((len(completion.split()) - items) / RANGE) ** 2
