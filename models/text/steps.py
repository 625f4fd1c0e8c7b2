"""Steps of a completion: where they end, and which tokens are theirs. Torch-free and pure.

Steps concatenated are the completion: what separates two steps belongs to the first of them.
Shapes: S steps, T tokens, P spans (runs of tokens that share a value).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Final, Literal, assert_never

import numpy as np
from numpy.typing import NDArray

from models.config.reward_terms import BlankLines, PatternSteps, Segmentation

Aggregate = Literal["mean", "sum", "min"]

_BLANK: Final = re.compile(r"\n(?:[^\S\n]*\n)+")

# Code fences as in CommonMark 0.31, section 4.5, at any indentation: lists indent them. Mathematics as in LaTeX.
_OPENING: Final = re.compile(r"^[ \t]*(?:(`{3,})[^`\n]*|(~{3,}).*)$|(?<!\\)(\$\$|\\\[)", re.MULTILINE)

_CLOSING: Final = {"$$": "$$", "\\[": "\\]"}


@dataclass(frozen=True, slots=True)
class StepValues:
    """Numbers of a completion's steps, in order."""

    lengths: tuple[int, ...]
    """Characters of each step."""
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Spans:
    """Numbers of runs of tokens; a run goes on to where the next begins."""

    starts: tuple[int, ...]
    """First token of each."""
    values: tuple[float, ...]


def aggregate(values: Sequence[float], how: Aggregate) -> float:
    """Make one number of those of steps or tokens; of none, 0."""
    if not values:
        return 0.0
    match how:
        case "mean":
            return fmean(values)
        case "sum":
            return float(sum(values))
        case "min":
            return min(values)
        case _:
            assert_never(how)


# ---- text
def segment(text: str, segmentation: Segmentation) -> list[str]:
    """Cut a completion into steps, at least one; only that of an empty or blank completion is blank.

    >>> segment("Add.\\n\\nSo 5.", BlankLines())
    ['Add.\\n\\n', 'So 5.']
    """
    match segmentation:
        case BlankLines():
            return _cut(text, _blank_lines(text))
        case PatternSteps(pattern=pattern):
            return _cut(text, [found.end() for found in re.finditer(pattern, text)])
        case _:
            assert_never(segmentation)


def _cut(text: str, ends: Sequence[int]) -> list[str]:
    """Cut where steps end, but leave no blank piece: it belongs to the step before it, at the beginning to the next."""
    pieces = [text[begin:end] for begin, end in pairwise((0, *ends, len(text)))]
    steps: list[str] = []
    for piece in pieces:
        if steps and (not piece.strip() or not steps[-1].strip()):
            steps[-1] += piece
        else:
            steps.append(piece)
    return steps


def _blank_lines(text: str) -> list[int]:
    """Find where blank lines end that stand outside of fences."""
    fences = iter(_fences(text))
    fence = next(fences, None)
    ends: list[int] = []
    for blank in _BLANK.finditer(text):
        while fence is not None and fence[1] <= blank.start():
            fence = next(fences, None)
        if fence is None or blank.start() < fence[0]:
            ends.append(blank.end())
    return ends


def last_code(text: str) -> str | None:
    """Find what stands in the last code fence, without the indentation of its opening line; none where there is none.

    >>> last_code("First:\\n```python\\nx = 1\\n```\\nThat is all.")
    'x = 1'
    """
    for begin, end in reversed(_fences(text)):
        opening, *lines = text[begin:end].split("\n")
        mark = opening.strip()[:3]
        if mark in ("```", "~~~"):
            closed = bool(lines) and lines[-1].strip().startswith(mark) and not lines[-1].strip().strip(mark[0])
            indent = opening[: len(opening) - len(opening.lstrip())]
            return "\n".join(line.removeprefix(indent) for line in lines[: -1 if closed else None])
    return None


def _fences(text: str) -> list[tuple[int, int]]:
    """Find code and display mathematics, begin and end, in order.

    Code that nobody closes goes on to the end of the text, as in CommonMark; a `$$` or `\\[` without its partner is no
    fence, since a stray one would make one step of all that follows.
    """
    found: list[tuple[int, int]] = []
    unclosed: set[str] = set()
    at = 0
    while opening := _OPENING.search(text, at):
        mark = opening[1] or opening[2] or opening[3]
        end = _end_of_fence(text, mark, opening.end()) if mark not in unclosed else -1
        if end < 0:
            unclosed.add(mark)  # nor is there one further on: the search stays linear
            at = opening.end()
        else:
            found.append((opening.start(), end))
            at = end
    return found


def _end_of_fence(text: str, mark: str, begin: int) -> int:
    if mark in _CLOSING:
        closing = text.find(_CLOSING[mark], begin)
        return closing + len(_CLOSING[mark]) if closing >= 0 else -1
    line = re.compile(rf"^[ \t]*{mark[0]}{{{len(mark)},}}[ \t]*$", re.MULTILINE).search(text, begin)
    return line.end() if line else len(text)


# ---- tokens
def spans_of(starts_T: Sequence[int], found: StepValues) -> Spans:
    """Give steps their tokens: each belongs to the step that holds its first character, those after the text to the
    last.

    `starts_T` has the character at which each token begins, in order, from 0. A step that no token begins in is merged
    into the one before it, whose last token wrote it too: the lower value counts, so that no flag is lost.
    """
    ends_S = np.array(list(accumulate(found.lengths)), dtype=np.int64)
    step_T: NDArray[np.int64] = np.searchsorted(ends_S, np.array(starts_T, dtype=np.int64), side="right")
    step_T = np.minimum(step_T, len(found.lengths) - 1)
    first_P = np.flatnonzero(np.diff(step_T, prepend=-1))  # steps of tokens never decrease
    steps = [*step_T[first_P].tolist(), len(found.lengths)]
    return Spans(
        starts=tuple(first_P.tolist()),
        values=tuple(min(found.values[begin:end]) for begin, end in pairwise(steps)),
    )
