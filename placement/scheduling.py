"""List scheduling: whole units, in order, each to the worker that is free first.

Shapes: X cases side by side (candidates × bootstraps), W workers, U units.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def list_schedule(free_XW: Floats, seconds_XU: Floats, *, ready_XU: Floats | None = None) -> tuple[Floats, Floats]:
    """Return when each unit ends [X, U], and when each worker is free then [X, W].

    `free_XW`: when each worker is free (infinite: no such worker). `ready_XU`: when each unit can begin, ascending; by
    default at once.
    """
    free_XW = free_XW.copy()
    cases = np.arange(free_XW.shape[0])
    ends_XU = np.empty_like(seconds_XU)
    for unit in range(seconds_XU.shape[1]):
        first_X = free_XW.argmin(axis=1)
        begin_X = free_XW[cases, first_X]
        if ready_XU is not None:
            begin_X = np.maximum(begin_X, ready_XU[:, unit])
        ends_XU[:, unit] = free_XW[cases, first_X] = begin_X + seconds_XU[:, unit]
    return ends_XU, free_XW
