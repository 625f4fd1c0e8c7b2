"""Right or wrong by the last number that is written in the expected form, as in GSM8K's `#### 17`."""

import re
from decimal import Decimal, InvalidOperation

from models.protocols import Reward
from models.rewards.config import NumericReward


def numeric_reward(config: NumericReward) -> Reward:
    """Compare exactly, as decimals: `1,000` is `1000.0`. A completion without a number is a wrong answer."""
    pattern = re.compile(config.pattern)

    def reward(prompt: str, completion: str, answer: str) -> float:
        bare = _number(answer)
        expected = _last(pattern, answer) if bare is None else bare
        if expected is None:
            raise ValueError(f"no number in the reference {answer[-60:]!r}")
        return float(_last(pattern, completion) == expected)

    return reward


def _last(pattern: re.Pattern[str], text: str) -> Decimal | None:
    matches = list(pattern.finditer(text))
    return _number(matches[-1][1] or "") if matches else None


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
