"""The learning rate, a pure function of the optimizer step: nothing to save, nothing to lose on resume."""

import math
from typing import Literal


def learning_rate(
    step: int,
    total_steps: int,
    *,
    peak: float,
    warmup_steps: int,
    schedule: Literal["constant", "linear", "cosine"],
    floor: float = 0.0,
) -> float:
    """Rate of optimizer step `step` (from 0): linear warm-up to the peak, then the schedule down to `floor` · peak."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    done = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    left = 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return peak * (floor + (1 - floor) * left)
