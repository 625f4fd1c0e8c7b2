"""How long a list should be, for the demo of preferences: the length that one reward likes another does not."""

from typing import Final

RANGE: Final = 14
"""Things over which a list can be too long or too short."""


def near(prompt: str, completion: str, answer: str, *, items: int, factor: float) -> float:
    """Return 0 for a list of so many words, and less the further it is from that: −factor ((n − items) / 14)²."""
    return -factor * ((len(completion.split()) - items) / RANGE) ** 2
