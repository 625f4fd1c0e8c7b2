"""Rewards for the form of a completion."""

import re

from models.protocols import Reward
from models.rewards.config import RegexReward


def pattern_reward(config: RegexReward) -> Reward:
    """Find the pattern anywhere in the completion: 1 or 0."""
    pattern = re.compile(config.pattern)

    def reward(prompt: str, completion: str, answer: str) -> float:
        return float(pattern.search(completion) is not None)

    return reward
