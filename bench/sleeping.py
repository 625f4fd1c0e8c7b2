"""Environment whose tools take time to answer. Like a user's environment, it imports nothing of Rheostat."""

import math
import random
import time


class Sleeping:
    """Environment that answers three turns.
    Before each answer it sleeps for a log-normal time that depends on seed and turn.
    """

    def __init__(self, sigma: float, turns: int) -> None:
        self.sigma, self.turns = sigma, turns

    def reset(self, problem, seed):
        """Start an episode. `mean_seconds` is a column of the problems."""
        self.mean_seconds, self.seed = problem["mean_seconds"], seed

    def step(self, turn):
        """Return the answer to a turn. The last answer ends the episode."""
        normal = random.Random(f"{self.seed}/{turn.number}").gauss(0, 1)
        time.sleep(self.mean_seconds * math.exp(self.sigma * normal - self.sigma**2 / 2))
        return {"messages": f"[{self.seed % 97}]", "done": turn.number + 1 == self.turns}
