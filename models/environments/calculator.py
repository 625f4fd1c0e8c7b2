"""An environment to learn from: a calculator that answers `<call>17*13</call>` with `<r>221</r>`.

It is written as a user's would be, and imports nothing of ours.
"""

from __future__ import annotations

import re
from typing import Any

_CALL = re.compile(r"<call>(\d{1,6})([+*-])(\d{1,6})</call>")
_REFUSAL = "\n<r>?</r>\n"


class Calculator:
    """Answers one calculation a turn; a turn without a call is the last."""

    def step(self, turn: Any) -> str | None:  # noqa: ANN401 -- of infra/episode_runner.py, which it need not know
        """Reckon, or say that the call cannot be read."""
        if "<call>" not in turn.text:
            return None
        call = _CALL.search(turn.text)
        return _REFUSAL if call is None else f"\n<r>{reckoned(int(call[1]), call[2], int(call[3]))}</r>\n"


def reckoned(left: int, sign: str, right: int) -> int:
    """Add, subtract or multiply.

    >>> reckoned(17, "*", 13)
    221
    """
    return left + right if sign == "+" else left - right if sign == "-" else left * right
