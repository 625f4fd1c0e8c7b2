"""Selection of each iteration's prompts, as pure functions of the seed and the state in the last seal.

The seal is the commit that ends an iteration. The stream of prompts is endless: each epoch is a new permutation of all
rows. If the problems have several weighted parts, such as the files of a mixture, each part has such a stream, and the
parts are mixed by weight. Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) takes prompts from the stream in
waves. Each wave has as many prompts as are likely needed to reach the target number of informative groups.

With a curriculum, each position of the stream has several candidate rows, and one of them is issued by its solve rate.
The weights of the parts can follow the solve rates, too.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, islice
from itertools import count as counted
from typing import Annotated, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, JsonValue

from rheostat.infra.config import Settings, Since
from rheostat.infra.counts import format_count
from rheostat.models.records.seeds import derive_seed


class Cursor(Settings):
    """Position in the endless stream of prompts. The commit that ends an iteration (its seal) stores it.

    A run that resumes from the last seal therefore neither skips nor repeats prompts.
    """

    position: int = 0
    """Number of prompts that were taken from the stream. Each was issued to an iteration or added to `returned`."""
    returned: tuple[int, ...] = ()
    """Row indices of prompts to issue, in this order, before the stream continues. A row may stay here for more than
    one epoch."""
    drawn: Annotated[tuple[int, ...], Since("0.2.0", before=())] = ()
    """Number of positions that were taken from the stream of each part. Empty if the weights of the parts are constant,
    because the numbers then follow from `position`."""


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive prompt rows with the same sampling weight, such as the rows of one file of a mixture."""

    rows: range
    weight: float


@dataclass(frozen=True, slots=True)
class PromptChoice:
    """Choice of one of several candidate rows for each position of the stream of prompts, by the solve rates of the
    prompts in earlier iterations.

    Of n consecutive positions, about `explore` n are chosen without regard to solve rates. There the first candidate
    without a known solve rate is issued or, if all are known, the first candidate. At all other positions, the
    candidate is issued whose solve rate p has the smallest |p - `target`|, and the first one of equals. MoPPS (arXiv
    2507.04632) chooses prompts by the same distance, but samples p from a Beta posterior of all groups of a prompt.
    Here p is the rate of the last group. The candidates that are not issued come again in the next epoch.
    """

    solve_rates: Mapping[int, float]
    """Last known solve rate of each prompt row, between 0 and 1. Rows without a known solve rate are not included."""
    target: float
    """Solve rate of the most useful prompt."""
    candidates: int
    """Number of candidate rows at each position."""
    explore: float
    """Share of the positions at which solve rates have no influence."""
    unseen: float
    """Solve rate that a row without a known solve rate counts as."""

    def choose(self, number: int, rows: Sequence[int]) -> int:
        """Return the row to issue among these candidates. `number` is the position in the stream, or in the stream of
        the part to which the rows belong."""
        if math.floor((number + 1) * self.explore) > math.floor(number * self.explore):
            return next((row for row in rows if row not in self.solve_rates), rows[0])
        return min(rows, key=lambda row: abs(self.solve_rates.get(row, self.unseen) - self.target))

    def metrics(self, rows: Collection[int]) -> dict[str, float]:
        """Return the number of rows with a known solve rate, and the sum of these solve rates."""
        known = [self.solve_rates[row] for row in rows if row in self.solve_rates]
        return {"seen_prompts": float(len(known)), "solve_rate_sum": math.fsum(known)}


class CandidateRows(NamedTuple):
    """Candidate rows of one position in the stream of prompts."""

    part: int
    """Index of the part to which the rows belong, or 0 if the rows are not divided into parts."""
    place: int
    """Position in the stream of the part."""
    rows: list[int]


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """Order of the endless stream of prompts, which the seed and the solve rates of the prompts determine."""

    num_prompts: int
    """Number of prompt rows."""
    seed: int
    """Root seed of the run."""
    parts: Sequence[Part] = ()
    """Parts from which rows are sampled by weight. Empty if the rows are not divided into parts."""
    choice: PromptChoice | None = None
    """Choice among several candidates of the same part, or None if every row of the random order is issued."""
    weights: Sequence[float] | None = None
    """Weights of the parts that have rows in this iteration, or None if each part always has its `weight`."""

    def drawn_before(self, cursor: Cursor) -> tuple[int, ...]:
        """Return the number of positions before the cursor that were taken from the stream of each part with rows."""
        parts = self._parts_with_rows
        if len(parts) < 2:
            return (cursor.position,)
        return cursor.drawn or _count_drawn(cursor.position, weights=[part.weight for part in parts], seed=self.seed)

    def candidates_from(self, cursor: Cursor, drawn: Sequence[int]) -> Iterator[CandidateRows]:
        """Yield the candidate rows of each position of the stream after the cursor. `drawn` is the result of
        `drawn_before`."""
        width = 1 if self.choice is None else self.choice.candidates
        parts = self._parts_with_rows
        if len(parts) < 2:
            yield from _candidates(0, cursor.position, num_prompts=self.num_prompts, seed=self.seed, width=width)
            return
        weights = self.weights or [part.weight for part in parts]
        streams = [
            _candidates(
                number, before, num_prompts=len(part.rows), seed=derive_seed(self.seed, "part", number), width=width
            )
            for number, (part, before) in enumerate(zip(parts, drawn, strict=True))
        ]
        for start in counted(cursor.position, _AHEAD):
            for number in _parts_at(range(start, start + _AHEAD), weights=weights, seed=self.seed).tolist():
                part, place, rows = next(streams[number])
                yield CandidateRows(part, place, [parts[number].rows[row] for row in rows])

    @property
    def _parts_with_rows(self) -> list[Part]:
        return [part for part in self.parts if part.rows]


def take_rows(
    cursor: Cursor, count: int, order: PromptOrder, *, taken: Collection[int], excluded: Collection[int] = ()
) -> tuple[tuple[int, ...], Cursor]:
    """Return the indices of the next `count` distinct prompt rows, and the cursor after them.

    Rows in `taken`, which the iteration already uses, are not issued again in this iteration. If the stream yields such
    a row, it is added to `returned` and issued later. Rows in `excluded` are never issued. A random other row takes the
    place of an excluded row. All other rows therefore keep their places, and the position is the same as if no row were
    excluded.
    Raises ValueError if there are fewer than `count` other rows.
    """
    others, never = frozenset(taken), frozenset(excluded)
    if not 0 <= count <= order.num_prompts - len(others | never):
        raise ValueError(
            f"{format_count(count, 'new prompt was', 'new prompts were')} requested for one iteration, but only "
            f"{order.num_prompts - len(others | never)} of {order.num_prompts} are not yet used in it. Request at most "
            "that number"
        )
    rows: dict[int, None] = {}
    waiting: list[int] = []
    adapts = bool(order.weights or cursor.drawn)
    for row in cursor.returned:
        if len(rows) < count and row not in others and row not in rows:
            rows[row] = None
        else:
            waiting.append(row)
    position, drawn = cursor.position, [*order.drawn_before(cursor)]
    stream = order.candidates_from(cursor, tuple(drawn))
    while len(rows) < count:
        part, place, candidates = next(stream)
        position += 1
        drawn[part] += 1
        allowed = [row for row in candidates if row not in never] or candidates[:1]
        unused = [row for row in allowed if row not in others and row not in rows]
        row = allowed[0] if order.choice is None else order.choice.choose(place, unused or allowed)
        if unused:
            rows[row] = None
        else:
            waiting.append(row)
    if adapts:  # a part with few rows and a large weight yields the same rows again and again
        waiting = [*dict.fromkeys(waiting)]
    after = Cursor(
        position=position,
        returned=tuple(row for row in waiting if row not in never),
        drawn=tuple(drawn) if adapts else (),
    )
    return _replace(rows, order, position, used=others | rows.keys(), excluded=never), after


def _replace(
    rows: Iterable[int], order: PromptOrder, position: int, *, used: Set[int], excluded: Set[int]
) -> tuple[int, ...]:
    """Return the rows with another row in the place of each excluded row.

    The other rows are sampled from the rows that are neither excluded nor in `used`, if possible from the same part as
    the excluded row. The choice depends only on the seed and on `position`, the position in the stream after the rows.
    """
    if excluded.isdisjoint(rows := tuple(rows)):
        return rows
    seed = derive_seed(order.seed, "replacements")
    free = dict.fromkeys(_permutation(position, num_prompts=order.num_prompts, seed=seed))
    for row in used | excluded:
        free.pop(row, None)
    replaced = list[int]()
    for row in rows:
        if row in excluded:
            part = next((part.rows for part in order.parts if row in part.rows), range(order.num_prompts))
            row = next((other for other in free if other in part), next(iter(free)))
            del free[row]
        replaced.append(row)
    return tuple(replaced)


def give_back(cursor: Cursor, rows: Iterable[int]) -> Cursor:
    """Return a cursor that issues these prompt rows once more, after the rows that already wait in `returned`."""
    return cursor.model_copy(update={"returned": (*cursor.returned, *rows)})


def _stream(position: int, *, num_prompts: int, seed: int) -> Iterator[int]:
    """Yield the indices of prompt rows from `position` of the endless stream on. Each epoch issues all rows in another
    random order."""
    epoch, offset = divmod(position, num_prompts)
    while True:
        yield from _permutation(epoch, num_prompts=num_prompts, seed=seed)[offset:]
        epoch, offset = epoch + 1, 0


def _candidates(part: int, position: int, *, num_prompts: int, seed: int, width: int) -> Iterator[CandidateRows]:
    """Yield the candidates of each position of one part's stream, from `position` on: `width` consecutive rows."""
    rows = _stream(position * width, num_prompts=num_prompts, seed=seed)
    for place in counted(position):
        yield CandidateRows(part, place, [*islice(rows, width)])


def _permutation(epoch: int, *, num_prompts: int, seed: int) -> Sequence[int]:
    """Return the random order in which an epoch issues all prompt rows. The order depends only on the seed and the
    epoch."""
    generator = np.random.Generator(np.random.Philox(derive_seed(seed, "epoch", epoch)))
    rows: list[int] = generator.permutation(num_prompts).tolist()
    return rows


_GOLDEN: Final = (math.sqrt(5) - 1) / 2
_BLOCK: Final = 2**16  # number of positions that are counted at once
_AHEAD: Final = 2**8  # number of positions that are computed at once; an iteration needs dozens


def _count_drawn(position: int, *, weights: Sequence[float], seed: int) -> tuple[int, ...]:
    """Return the number of positions before `position` of the mixed stream that belong to each part, if the weights are
    constant."""
    num_drawn = np.zeros(len(weights), dtype=np.int64)
    for start in range(0, position, _BLOCK):
        places = _parts_at(range(start, min(start + _BLOCK, position)), weights=weights, seed=seed)
        num_drawn += np.bincount(places, minlength=len(weights))
    return tuple(num_drawn.tolist())


def _parts_at(places: range, *, weights: Sequence[float], seed: int) -> NDArray[np.int64]:
    """Return the index of the part that supplies the row, for each position in `places` of the mixed stream.

    Position p of the stream belongs to the part whose interval contains the fractional part of u + p (sqrt(5) - 1) / 2.
    The offset u in [0, 1) is derived from the seed. The intervals fill [0, 1) in order, and the length of each is the
    part's share of the total weight. Over seeds, the probability of a part is therefore its share. Among n consecutive
    positions, the count of a part deviates from its share of n by O(log n), because this sequence has low discrepancy
    (Niederreiter, Random Number Generation and Quasi-Monte Carlo Methods, 1992, chapter 3). Within a part, each epoch
    is a new permutation of the part's rows.
    """
    ends = np.cumsum(weights)
    first = derive_seed(seed, "mixture") / 2**64
    points = (first + np.arange(places.start, places.stop, dtype=np.float64) * _GOLDEN) % 1.0
    return np.minimum(np.searchsorted(ends / ends[-1], points, side="right"), len(weights) - 1)


def learnable_weights(
    parts: Sequence[Part], solve_rates: Mapping[int, float], *, min_factor: float, num_prompts: int
) -> list[float]:
    """Return the weight of each part with rows, adapted to how much can be learned from it.

    The learnability of a part is the mean of p (1 - p) over the known solve rates p of its prompts (arXiv 2502.12272).
    The weight is multiplied by this learnability as a share of the largest one, and at least by `min_factor`. The
    factor is 1 for parts without known solve rates and if all learnabilities are zero. The result sums to 1, and no
    part supplies more of `num_prompts` prompts than it has rows.
    """
    parts = [part for part in parts if part.rows]
    numbers = np.searchsorted([part.rows.stop for part in parts], [*solve_rates], side="right")
    rates = np.fromiter(solve_rates.values(), dtype=np.float64)
    counts, sums = (np.bincount(numbers, each, len(parts)) for each in (None, rates * (1 - rates)))
    known = counts > 0
    learnability = np.divide(sums, counts, out=np.zeros(len(parts)), where=known)
    factors = np.ones(len(parts))
    if learnability.max() > 0:
        factors[known] = np.maximum(learnability[known] / learnability.max(), min_factor)
    weights = {number: part.weight * factors[number] for number, part in enumerate(parts)}
    limits, shares, rest = [len(part.rows) / num_prompts for part in parts], dict[int, float](), 1.0
    while True:
        total = sum(weights.values())
        over = [number for number, weight in weights.items() if weight / total * rest > limits[number]]
        if not over or len(over) == len(weights):
            break
        for number in over:
            shares[number] = limits[number]
            rest -= limits[number]
            del weights[number]
    shares |= {number: float(weight / total * rest) for number, weight in weights.items()}
    return [shares[number] for number in range(len(parts))]


def read_parts(detail: Mapping[str, JsonValue]) -> tuple[Part, ...]:
    """Return the parts that are recorded in a manifest of prompts, from its field `detail`. Empty if the rows are not
    divided into parts."""
    listed = _Parts.model_validate(detail.get("parts", {}))
    ends = [*accumulate(listed.rows)]
    return tuple(
        Part(range(end - rows, end), weight)
        for end, rows, weight in zip(ends, listed.rows, listed.weights, strict=True)
    )


class _Parts(Settings):
    """Number of rows and weight of each part, in the format in which a manifest of prompts records them."""

    rows: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()


def max_prompts(rows: Sequence[int], weights: Sequence[float]) -> tuple[int, int]:
    """Return the maximum number of prompts for an iteration, and the index of the part that limits it. `rows` and
    `weights` list the number of rows and the sampling weight of each part.

    With more prompts, that part would have to supply more distinct rows than it has.

    >>> max_prompts([1000, 5], [9, 1])
    (50, 1)
    """
    most = [
        math.floor(round(have * sum(weights) / weight, _DIGITS)) for have, weight in zip(rows, weights, strict=True)
    ]
    return min(most), most.index(min(most))


_MAX_RATIO: Final = 10.0  # an iteration without informative groups must not make the next one endless
_MEMORY: Final = 0.9
_DIGITS: Final = 9  # rounds away binary errors: 10 x 1.0 x 1.1 is above 11, so its ceiling would be 12


class DynamicSamplingState(Settings):
    """Estimate of the number of prompts that dynamic sampling needs per informative group (a group with unequal
    rewards).

    The commit that ends an iteration stores the estimate for the next iteration.
    """

    ema: Annotated[float, Field(gt=0)] = 1.0
    """Exponential moving average of issued prompts divided by informative groups."""

    def after(self, issued: int, informative: int) -> "DynamicSamplingState":
        """Return the updated estimate after an iteration with `issued` prompts and `informative` informative groups.
        Unchanged if no prompt was issued."""
        return DynamicSamplingState(ema=next_ema(self.ema, issued, informative)) if issued else self


def wave_size(gap: int, ema: float, margin: float, *, over_dispatch: float = 0.0) -> int:
    """Return the number of prompts for a wave (a batch of prompts) that should yield `gap` informative groups.

    The number is ceil(gap x ema x margin), where `ema` is the expected number of prompts per informative group, and
    `margin` a safety factor. The first wave of an iteration with partial rollout multiplies this by 1 + `over_dispatch`
    before rounding up, to make up for the groups that will be cut.

    >>> wave_size(10, 1.0, 1.2)
    12
    """
    return math.ceil(round(gap * ema * margin * (1 + over_dispatch), _DIGITS))


def another_wave(wave: int, gap: int, *, max_extra_waves: int) -> bool:
    """Return whether dynamic sampling generates another wave of prompts after wave number `wave` (counted from 1):
    `gap` informative groups are still missing, and at most `max_extra_waves` waves may follow the first one."""
    return gap > 0 and wave < 1 + max_extra_waves


def next_ema(ema: float, issued: int, informative: int) -> float:
    """Return the updated moving average of prompts per informative group: 0.9 ema + 0.1 min(issued / informative, 10).
    The ratio is 10 if no group was informative.

    >>> next_ema(1.0, 60, 20)
    1.2
    """
    ratio = min(issued / informative, _MAX_RATIO) if informative else _MAX_RATIO
    return _MEMORY * ema + (1 - _MEMORY) * ratio
