"""Which prompts an iteration gets: a pure function of the seed and of how many were issued before."""

import numpy as np

from models.seeds import derive_seed


def prompt_rows(issued: int, count: int, *, num_prompts: int, seed: int) -> tuple[int, ...]:
    """Rows of the `count` prompts that follow the first `issued`; every epoch is a new permutation of all rows.

    `issued` is derived from the sealed manifests, so a resumed run neither skips nor repeats a prompt.
    """
    rows: list[int] = []
    while count > 0:
        epoch, offset = divmod(issued, num_prompts)
        order = np.random.Generator(np.random.Philox(derive_seed(seed, "epoch", epoch))).permutation(num_prompts)
        taken = order[offset : offset + count]
        rows += [int(row) for row in taken]
        issued += len(taken)
        count -= len(taken)
    return tuple(rows)
