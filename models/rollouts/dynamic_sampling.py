"""Dynamic sampling in waves (DAPO, arXiv 2503.14476, section 3.2): how many prompts to issue for a target."""

import math
from typing import Annotated, Final

from pydantic import Field

from infra.config import Settings

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
