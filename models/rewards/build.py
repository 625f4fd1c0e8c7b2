"""From the configuration of a reward that is a rule to the function that judges."""

import re
from typing import assert_never

from infra.errors import BadInput
from models.protocols import Reward
from models.rewards.config import MathReward, NumericReward, RegexReward, RuleReward, TargetReward
from models.rewards.numeric import numeric_reward
from models.rewards.pattern import pattern_reward
from models.rewards.target import target_reward


def build_reward(config: RuleReward) -> Reward:
    """Make a reward; what cannot work is bad input here, before any completion exists."""
    match config:
        case NumericReward():
            _check_pattern(config.pattern, groups=1)
            return numeric_reward(config)
        case RegexReward():
            _check_pattern(config.pattern, groups=0)
            return pattern_reward(config)
        case MathReward():
            from models.rewards.mathematics import mathematics_reward  # sympy: only runs that use it pay for it

            return mathematics_reward()
        case TargetReward():
            return target_reward(config)
        case _:
            assert_never(config)


def check_reward(config: RuleReward) -> None:
    """Raise BadInput, naming what was meant where it can, if the reward cannot be built."""
    build_reward(config)


def _check_pattern(pattern: str, *, groups: int) -> None:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise BadInput(f"reward pattern {pattern!r} is not a regular expression: {error}") from error
    if compiled.groups < groups:
        raise BadInput(f"reward pattern {pattern!r}: expected a group around the number, found none")
