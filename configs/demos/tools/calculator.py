"""Environment: a calculator that answers `<call>17*13</call>` with `<r>221</r>`.

It runs in a process that imports nothing of Rheostat.
"""

from __future__ import annotations

import re
from typing import Any

_CALL = re.compile(r"<call>(\d{1,6})([+*-])(\d{1,6})</call>")
_REFUSAL = "\n<r>?</r>\n"


class Calculator:
    """Environment that computes the arithmetic in the `<call>` of each turn. A turn without a call ends the
    episode."""

    def step(self, turn: Any) -> str | None:  # noqa: ANN401 -- has a `text`; docs/environments.md
        """Return the result of the turn's call, or `<r>?</r>` if the call cannot be parsed. Returns None, which ends
        the episode, if the turn has no call."""
        if "<call>" not in turn.text:
            return None
        call = _CALL.search(turn.text)
        return _REFUSAL if call is None else f"\n<r>{calculate(int(call[1]), call[2], int(call[3]))}</r>\n"


def calculate(left: int, sign: str, right: int) -> int:
    """Add, subtract or multiply two integers, depending on `sign`.

    >>> calculate(17, "*", 13)
    221
    """
    return left + right if sign == "+" else left - right if sign == "-" else left * right
