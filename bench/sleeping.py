"""An environment whose tools take their time: it imports nothing of ours, as a user's would."""

import math
import random
import time


class Sleeping:
    """Answers three turns; before each answer it sleeps for a log-normal time, which seed and turn alone decide."""

    def __init__(self, sigma: float, turns: int) -> None:
        self.sigma, self.turns = sigma, turns

    def reset(self, problem, seed):
        """`mean_seconds` is a column of the problems."""
        self.mean_seconds, self.seed = problem["mean_seconds"], seed

    def step(self, turn):
        """Answer, the last time to say that this is all."""
        normal = random.Random(f"{self.seed}/{turn.number}").gauss(0, 1)
        time.sleep(self.mean_seconds * math.exp(self.sigma * normal - self.sigma**2 / 2))
        return {"messages": f"[{self.seed % 97}]", "done": turn.number + 1 == self.turns}
