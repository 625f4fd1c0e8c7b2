"""Which prompts an iteration gets: a pure function of the seed and of how many were issued before."""

import numpy as np

from models.seeds import derive_seed


def prompt_rows(issued: int, count: int, *, num_prompts: int, seed: int) -> tuple[int, ...]:
    """Rows of the `count` prompts that follow the first `issued`, none of them twice.

    Every epoch is a new order of all rows. All iterations take the same `count`, at most `num_prompts`. `issued` is
    derived from the sealed manifests, so a resumed run neither skips nor repeats a prompt.
    """
    if not 0 < count <= num_prompts:
        raise ValueError(f"expected 1 to {num_prompts} prompts per iteration, found {count}")
    epoch, offset = divmod(issued, num_prompts)
    order = _epoch_order(epoch, count, num_prompts=num_prompts, seed=seed)
    taken = order[offset : offset + count]
    if len(taken) < count:
        following = _epoch_order(epoch + 1, count, num_prompts=num_prompts, seed=seed)
        taken += following[: count - len(taken)]
    return tuple(taken)


def _epoch_order(epoch: int, count: int, *, num_prompts: int, seed: int) -> list[int]:
    """A permutation whose head shares no row with the tail that the epoch before left to the same iteration."""
    order: list[int] = []
    for number in range(epoch + 1):
        drawn = [int(row) for row in _permutation(number, num_prompts=num_prompts, seed=seed)]
        left_over = num_prompts * number % count
        tail = set(order[len(order) - left_over :]) if left_over else set()
        head = [row for row in drawn if row not in tail][: count - left_over] if left_over else []
        ahead = set(head)
        order = head + [row for row in drawn if row not in ahead]
    return order


def _permutation(epoch: int, *, num_prompts: int, seed: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.random.Generator(np.random.Philox(derive_seed(seed, "epoch", epoch))).permutation(num_prompts)
