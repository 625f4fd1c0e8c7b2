"""Which prompts an iteration gets: a pure function of the seed and of the cursor that the last seal left.

The stream is endless: epoch after epoch, each a new order of all rows.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np

from infra.config import Settings
from models.records.seeds import derive_seed


class Cursor(Settings):
    """A place in the stream of prompts; it is derived from sealed iterations, so resuming neither skips nor repeats."""

    position: int = 0
    """Prompts of the stream that were consumed: issued, or put among `returned`."""
    returned: tuple[int, ...] = ()
    """Rows that come before the stream goes on, in order; a row may wait here for more than one epoch."""


def take(
    cursor: Cursor, count: int, *, taken: Collection[int], num_prompts: int, seed: int
) -> tuple[tuple[int, ...], Cursor]:
    """Return the next `count` different rows and the cursor after them; none is of `taken`, the iteration's others.

    A row of the stream that the iteration has already comes at the end of `returned`: later, but not never.
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
