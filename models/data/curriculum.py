"""Which prompts an iteration gets, and how many: pure functions of the seed and of what the last seal left.

The stream is endless: epoch after epoch, each a new order of all rows; or, where the problems have several parts with
weights, a mixture of such streams, one of each part. Dynamic sampling (DAPO, arXiv 2503.14476,
section 3.2) takes of it in waves, as many prompts as a target of informative groups is likely to cost.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from itertools import count as counted
from typing import Annotated, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, JsonValue

from infra.config import Settings
from models.records.seeds import derive_seed


class Cursor(Settings):
    """A place in the stream of prompts; it is derived from sealed iterations, so resuming neither skips nor repeats."""

    position: int = 0
    """Prompts of the stream that were consumed: issued, or put among `returned`."""
    returned: tuple[int, ...] = ()
    """Rows that come before the stream goes on, in order; a row may wait here for more than one epoch."""


@dataclass(frozen=True, slots=True)
class Part:
    """Successive rows of the prompts, and how much of the stream is of them."""

    rows: range
    weight: float


def take(
    cursor: Cursor, count: int, *, taken: Collection[int], num_prompts: int, seed: int, parts: Sequence[Part] = ()
) -> tuple[tuple[int, ...], Cursor]:
    """Return the next `count` different rows and the cursor after them; none is of `taken`, the iteration's others.

    With `parts` the stream draws of each by its weight. A row of the stream that the iteration has already comes at the
    end of `returned`: later, but not never.
    """
    others = frozenset(taken)
    if not 0 <= count <= num_prompts - len(others):
        raise ValueError(f"expected at most {num_prompts - len(others)} prompts beside {len(others)}, found {count}")
    rows: dict[int, None] = {}
    waiting: list[int] = []
    for row in cursor.returned:
        if len(rows) < count and row not in others and row not in rows:
            rows[row] = None
        else:
            waiting.append(row)
    position = cursor.position
    drawn = [part for part in parts if part.rows]
    if len(drawn) > 1:
        stream = _mixture(position, parts=drawn, seed=seed)
    else:
        stream = _stream(position, num_prompts=num_prompts, seed=seed)
    while len(rows) < count:
        row = next(stream)
        position += 1
        if row in others or row in rows:
            waiting.append(row)
        else:
            rows[row] = None
    return tuple(rows), Cursor(position=position, returned=tuple(waiting))


def give_back(cursor: Cursor, rows: Iterable[int]) -> Cursor:
    """Let rows that were issued come again, behind those that wait already."""
    return Cursor(position=cursor.position, returned=(*cursor.returned, *rows))


def _stream(position: int, *, num_prompts: int, seed: int) -> Iterator[int]:
    epoch, offset = divmod(position, num_prompts)
    while True:
        yield from _permutation(epoch, num_prompts=num_prompts, seed=seed)[offset:]
        epoch, offset = epoch + 1, 0


def _permutation(epoch: int, *, num_prompts: int, seed: int) -> Sequence[int]:
    generator = np.random.Generator(np.random.Philox(derive_seed(seed, "epoch", epoch)))
    rows: list[int] = generator.permutation(num_prompts).tolist()
    return rows


_GOLDEN: Final = (math.sqrt(5) - 1) / 2
_BLOCK: Final = 2**16  # positions that are counted together
_AHEAD: Final = 2**8  # positions that are drawn together: an iteration asks for dozens


def _mixture(position: int, *, parts: Sequence[Part], seed: int) -> Iterator[int]:
    """Go on with the stream of several parts.

    Place p of the stream is of the part in whose interval the fractional part of u + p (sqrt(5) - 1) / 2 lies; u in
    [0, 1) follows from the seed, and the intervals, each as long as the part's share of all weights, fill [0, 1) in
    order. So over seeds a place is of a part with the probability of its share, and among the first n places a part's
    count is off its share of n by O(log n), since this sequence is of low discrepancy (Niederreiter, Random Number
    Generation and Quasi-Monte Carlo Methods, 1992, chapter 3). A part's own places go through its rows epoch after
    epoch, each in a new order.
    """
    drawn = np.zeros(len(parts), dtype=np.int64)
    for start in range(0, position, _BLOCK):
        places = _parts_at(range(start, min(start + _BLOCK, position)), parts=parts, seed=seed)
        drawn += np.bincount(places, minlength=len(parts))
    streams = [
        _stream(int(before), num_prompts=len(part.rows), seed=derive_seed(seed, "part", number))
        for number, (part, before) in enumerate(zip(parts, drawn, strict=True))
    ]
    for start in counted(position, _AHEAD):
        for number in _parts_at(range(start, start + _AHEAD), parts=parts, seed=seed).tolist():
            yield parts[number].rows[next(streams[number])]


def _parts_at(places: range, *, parts: Sequence[Part], seed: int) -> NDArray[np.int64]:
    """Return the number of the part that each place of the stream is of."""
    ends = np.cumsum([part.weight for part in parts])
    first = derive_seed(seed, "mixture") / 2**64
    points = (first + np.arange(places.start, places.stop, dtype=np.float64) * _GOLDEN) % 1.0
    return np.minimum(np.searchsorted(ends / ends[-1], points, side="right"), len(parts) - 1)


def parts_of(detail: Mapping[str, JsonValue]) -> tuple[Part, ...]:
    """Read the parts that a prompts' manifest tells of; none where all its rows are one."""
    found = _Parts.model_validate(detail.get("parts", {}))
    ends = [*accumulate(found.rows)]
    return tuple(
        Part(range(end - rows, end), weight) for end, rows, weight in zip(ends, found.rows, found.weights, strict=True)
    )


class _Parts(Settings):
    """As a manifest spells them."""

    rows: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()


def most_prompts(rows: Sequence[int], weights: Sequence[float]) -> tuple[int, int]:
    """Return the most prompts of an iteration that ask no part for more different rows than it has, and that part.

    >>> most_prompts([1000, 5], [9, 1])
    (50, 1)
    """
    most = [
        math.floor(round(have * sum(weights) / weight, _DIGITS)) for have, weight in zip(rows, weights, strict=True)
    ]
    return min(most), most.index(min(most))


_MAX_RATIO: Final = 10.0  # one iteration that teaches nothing must not make the next one endless
_MEMORY: Final = 0.9
_DIGITS: Final = 9  # what binary fractions add: 10 x 1.0 x 1.1 lies above 11, and its ceiling would be 12


class DynamicSamplingState(Settings):
    """What is known about the yield of prompts; it travels from seal to seal."""

    ema: Annotated[float, Field(gt=0)] = 1.0
    """Smoothed issued/informative: prompts that one informative group costs."""

    def after(self, issued: int, informative: int) -> "DynamicSamplingState":
        """Return what is known after an iteration with so many groups; one with no group tells nothing."""
        return DynamicSamplingState(ema=next_ema(self.ema, issued, informative)) if issued else self


def wave_size(gap: int, ema: float, margin: float, *, over_dispatch: float = 0.0) -> int:
    """Return the prompts of a wave that is to close a gap of informative groups: ceil(gap x ema x margin).

    The first wave of an iteration with partial rollout issues a share more, for the groups that will be cut.

    >>> wave_size(10, 1.0, 1.2)
    12
    """
    return math.ceil(round(gap * ema * margin * (1 + over_dispatch), _DIGITS))


def another_wave(wave: int, gap: int, *, max_extra_waves: int) -> bool:
    """Tell whether wave number `wave`, counted from 1, is followed by one more."""
    return gap > 0 and wave < 1 + max_extra_waves


def next_ema(ema: float, issued: int, informative: int) -> float:
    """Return 0.9 ema + 0.1 min(issued / informative, 10); an iteration without an informative group counts as 10.

    >>> next_ema(1.0, 60, 20)
    1.2
    """
    ratio = min(issued / informative, _MAX_RATIO) if informative else _MAX_RATIO
    return _MEMORY * ema + (1 - _MEMORY) * ratio
