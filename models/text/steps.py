"""Steps of a completion: their boundaries in the text, and the tokens that belong to them. Torch-free and pure.

The concatenation of all steps is the completion. A separator belongs to the step before it. Shapes: S steps, T tokens,
P spans (runs of tokens that share a value).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from statistics import fmean
from typing import Final, Literal, assert_never

import numpy as np
from numpy.typing import NDArray

from rheostat.models.config.reward_terms import BlankLines, PatternSteps, Segmentation

Aggregate = Literal["mean", "sum", "min", "product", "last"]
"""Name of the function that combines the scores of a completion's steps, tokens or turns into one number."""

_BLANK: Final = re.compile(r"\n(?:[^\S\n]*\n)+")
"""Regular expression for a line break that is followed by one or more blank lines."""

# Start of a code fence as in CommonMark 0.31, section 4.5, but with any indentation, because lists indent fences; or of
# display mathematics as in LaTeX.
_OPENING: Final = re.compile(r"^[ \t]*(?:(`{3,})[^`\n]*|(~{3,}).*)$|(?<!\\)(\$\$|\\\[)", re.MULTILINE)

_CLOSING: Final = {"$$": "$$", "\\[": "\\]"}


@dataclass(frozen=True, slots=True)
class StepValues:
    """Lengths and rewards of the reasoning steps of a completion, in order."""

    lengths: tuple[int, ...]
    """Length of each reasoning step in characters."""
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Spans:
    """Rewards of consecutive runs of completion tokens. Each run ends where the next one starts."""

    starts: tuple[int, ...]
    """Index of the first token of each run of tokens."""
    values: tuple[float, ...]


def aggregate(values: Sequence[float], how: Aggregate) -> float:
    """Combine the scores of steps, tokens or turns into one number by the function `how`. Returns 0 if there are no
    scores."""
    if not values:
        return 0.0
    match how:
        case "mean":
            return fmean(values)
        case "sum":
            return float(sum(values))
        case "min":
            return min(values)
        case "product":
            return prod(values)
        case "last":
            return values[-1]
        case _:
            assert_never(how)


# ---- text
def split_steps(text: str, segmentation: Segmentation) -> list[str]:
    """Split a completion into one or more steps. A step is blank only if the whole completion is blank.

    >>> split_steps("Add.\\n\\nSo 5.", BlankLines())
    ['Add.\\n\\n', 'So 5.']
    """
    match segmentation:
        case BlankLines():
            return _split_at(text, _find_blank_lines(text))
        case PatternSteps(pattern=pattern):
            return _split_at(text, [match.end() for match in re.finditer(pattern, text)])
        case _:
            assert_never(segmentation)


def _split_at(text: str, ends: Sequence[int]) -> list[str]:
    """Split a text at the character indices `ends`.

    A blank piece is merged into the step before it, or at the start of the text into the step after it.
    """
    pieces = [text[begin:end] for begin, end in pairwise((0, *ends, len(text)))]
    steps: list[str] = []
    for piece in pieces:
        if steps and (not piece.strip() or not steps[-1].strip()):
            steps[-1] += piece
        else:
            steps.append(piece)
    return steps


def _find_blank_lines(text: str) -> list[int]:
    """Return the character index after each run of blank lines that is outside of code fences and display
    mathematics."""
    fences = iter(_find_fences(text))
    fence = next(fences, None)
    ends: list[int] = []
    for blank in _BLANK.finditer(text):
        while fence is not None and fence[1] <= blank.start():
            fence = next(fences, None)
        if fence is None or blank.start() < fence[0]:
            ends.append(blank.end())
    return ends


def find_last_code(text: str) -> str | None:
    """Return the content of the last code fence without the indentation of its opening line.

    Returns None if the text has no code fence.

    >>> find_last_code("First:\\n```python\\nx = 1\\n```\\nThat is all.")
    'x = 1'
    """
    for begin, end in reversed(_find_fences(text)):
        opening, *lines = text[begin:end].split("\n")
        mark = opening.strip()[:3]
        if mark in ("```", "~~~"):
            closed = bool(lines) and lines[-1].strip().startswith(mark) and not lines[-1].strip().strip(mark[0])
            indent = opening[: len(opening) - len(opening.lstrip())]
            return "\n".join(line.removeprefix(indent) for line in lines[: -1 if closed else None])
    return None


def _find_fences(text: str) -> list[tuple[int, int]]:
    r"""Return the start and end index of each code fence and each display mathematics block, in order. Unclosed code
    continues to the end of the text, as in CommonMark. An unclosed `$$` or `\[` is not a block, because otherwise a
    stray one would merge the whole rest of the text into one step."""
    fences: list[tuple[int, int]] = []
    unclosed: set[str] = set()
    at = 0
    while opening := _OPENING.search(text, at):
        mark = opening[1] or opening[2] or opening[3]
        end = _find_end_of_fence(text, mark, opening.end()) if mark not in unclosed else -1
        if end < 0:
            unclosed.add(mark)  # no closing mark follows any later one either, so the search stays linear
            at = opening.end()
        else:
            fences.append((opening.start(), end))
            at = end
    return fences


def _find_end_of_fence(text: str, mark: str, begin: int) -> int:
    """Return the index after the code or mathematics block that starts at `begin` with `mark`. Returns -1 if it is
    display mathematics that is not closed."""
    if mark in _CLOSING:
        closing = text.find(_CLOSING[mark], begin)
        return closing + len(_CLOSING[mark]) if closing >= 0 else -1
    line = re.compile(rf"^[ \t]*{mark[0]}{{{len(mark)},}}[ \t]*$", re.MULTILINE).search(text, begin)
    return line.end() if line else len(text)


# ---- tokens
def assign_spans(starts_T: Sequence[int], found: StepValues) -> Spans:
    """Assign each token to the reasoning step that contains its first character, and return the values of the steps as
    runs of tokens. `starts_T` is the character index at which each token starts, ascending from 0.

    Tokens after the end of the text belong to the last step. A step in which no token starts is merged into the step
    before it, because the last token of that step also contains its text. The merged step has the lower of the two
    values, so that no step flagged as wrong is lost.
    """
    ends_S = np.array(list(accumulate(found.lengths)), dtype=np.int64)
    step_T: NDArray[np.int64] = np.searchsorted(ends_S, np.array(starts_T, dtype=np.int64), side="right")
    step_T = np.minimum(step_T, len(found.lengths) - 1)
    first_P = np.flatnonzero(np.diff(step_T, prepend=-1))  # step numbers of tokens never decrease
    steps = [*step_T[first_P].tolist(), len(found.lengths)]
    return Spans(
        starts=tuple(first_P.tolist()),
        values=tuple(min(found.values[begin:end]) for begin, end in pairwise(steps)),
    )
