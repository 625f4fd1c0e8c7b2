"""How a batch is cut into shards, and which controller owns which shards."""

from collections.abc import Sequence
from itertools import pairwise
from math import ceil


def cut(num_prompts: int, *, shard_prompts: int) -> tuple[range, ...]:
    """Positions of each shard's prompts. Shards do not depend on the number of controllers or workers.

    >>> cut(5, shard_prompts=2)
    (range(0, 2), range(2, 4), range(4, 5))
    """
    num_shards = ceil(num_prompts / shard_prompts)
    return tuple(range(i * shard_prompts, min((i + 1) * shard_prompts, num_prompts)) for i in range(num_shards))


def slice_shards(shards: Sequence[int], *, controllers: int) -> tuple[tuple[int, ...], ...]:
    """Contiguous slices of nearly equal size, at most one per controller, none empty.

    >>> deal([0, 1, 2], controllers=2)
    ((0, 1), (2,))
    """
    owners = min(controllers, len(shards))
    bounds = [len(shards) * owner // owners for owner in range(owners + 1)] if owners else [0]
    # Ceil-first keeps the larger slices with the first controllers.
    sizes = sorted((stop - start for start, stop in pairwise(bounds)), reverse=True)
    slices, start = [], 0
    for size in sizes:
        slices.append(tuple(shards[start : start + size]))
        start += size
    return tuple(slices)
