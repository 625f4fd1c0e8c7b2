"""Critiques: which steps of a completion a judge found wrong, and what the votes make of them. Torch-free.

The method is CAPO's (arXiv 2508.02298); what it leaves open is said where it is decided.
Shapes: S steps.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, assert_never

from models.rewards.config import StepsVerdict

# The text of a pair holds no tag of its kind, so that the last pair is the innermost of its tags.
_PAIR: Final = re.compile(r"<incorrect_steps>((?:(?!</?incorrect_steps>).)*)</incorrect_steps>", re.S | re.I)
_INDEX: Final = re.compile(r"(?:<step_)?(-?[0-9]+)>?|step_([0-9]+)", re.I)
_NONE: Final = {"none", "n/a", "[]"}
_DIGITS: Final = 9  # no completion has steps that take more


@dataclass(frozen=True, slots=True)
class Critique:
    """What one answer says."""

    steps: tuple[int, ...]
    """Steps found wrong, in order."""
    dropped: int
    """Numbers in the list that are no step of the completion."""


def read_critique(text: str, *, num_steps: int) -> Critique | str:
    """Read the last `<incorrect_steps>` pair of an answer, or say why it cannot be read.

    Nothing between the tags, or `none`, means that no step is wrong; a list that is no list of numbers means nothing.
    """
    pairs = list(_PAIR.finditer(text))
    if not pairs:
        return "expected a pair of <incorrect_steps> tags, found none"
    listed = pairs[-1][1].strip()
    if listed.casefold().rstrip(".") in _NONE:
        return Critique((), 0)
    words = [word for word in re.split(r"[,;\s]+", listed) if word]
    found = [_INDEX.fullmatch(word) for word in words]
    if None in found:
        return f"expected numbers of steps between the tags, found {words[found.index(None)]!r}"
    digits = [match[1] or match[2] for match in found if match is not None]
    indices = [int(number) for number in digits if len(number) <= _DIGITS]
    steps = {index for index in indices if 0 <= index < num_steps}
    return Critique(tuple(sorted(steps)), len(digits) - sum(index in steps for index in indices))


def flag_weights(critiques: Sequence[Sequence[int]], verdict: StepsVerdict, *, num_steps: int) -> list[float]:
    """Return how wrong each step is by the votes, 0 to 1; without a usable critique no step is.

    `critiques` are the usable ones alone: one that cannot be read counts neither for a step nor against it.
    """
    counts, k = Counter(step for critique in critiques for step in critique), len(critiques)
    if not k:
        return [0.0] * num_steps
    return [_weight(counts[step], k, verdict) for step in range(num_steps)]


def _weight(count: int, k: int, verdict: StepsVerdict) -> float:
    match verdict.flags:
        case "intersection":
            return float(count == k)
        case "majority":
            return float(2 * count >= k if verdict.ties == "flag" else 2 * count > k)
        case "union":
            return float(count > 0)
        case "average":
            return count / k
        case _:
            assert_never(verdict.flags)
