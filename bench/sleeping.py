"""Environment whose tools take time to answer. Like a user's environment, it imports nothing of Rheostat."""

import math
import random
import time


class Sleeping:
    """Environment with slow tools, for benchmarks: every answer to a turn is delayed.

    The delay is log-normal and depends only on the seed and the turn. An episode has `turns` turns.
    """

    def __init__(self, sigma: float, turns: int) -> None:
        self.sigma, self.turns = sigma, turns

    def reset(self, problem, seed):
        """Start an episode. The mean delay in seconds is the column `mean_seconds` of the problem."""
        self.mean_seconds, self.seed = problem["mean_seconds"], seed

    def step(self, turn):
        """Sleep, then return the environment's answer to a turn. The answer to the last turn ends the episode."""
        normal = random.Random(f"{self.seed}/{turn.number}").gauss(0, 1)
        time.sleep(self.mean_seconds * math.exp(self.sigma * normal - self.sigma**2 / 2))
        return {"messages": f"[{self.seed % 97}]", "done": turn.number + 1 == self.turns}
