"""Environments of a user, valid and invalid. They import no module of Rheostat."""

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path


class Echo:
    """Environment that reports the length of each turn. The episode ends after the third turn."""

    def __init__(self, reward=None):
        self.reward, self.seen = reward, []

    def reset(self, problem, seed):
        self.problem, self.seed = problem, seed

    def step(self, turn):
        self.seen.append(turn.text)
        done = turn.number == 2
        reward = None if self.reward is None else self.reward * (turn.number + 1)
        return {
            "messages": f"[{turn.number} {sum(map(len, self.seen))} {self.seed % 7}]",
            "done": done,
            "reward": reward,
        }


class Opens(Echo):
    """Environment that speaks first."""

    def reset(self, problem, seed):
        super().reset(problem, seed)
        return f"begin {seed % 10}:"


class Knows(Echo):
    """Environment that answers with the columns of the problem other than the prompt."""

    def step(self, turn):
        told = {name: value for name, value in self.problem.items() if name != "prompt"}
        return f"[{json.dumps(told, sort_keys=True)}]"


class Bad(Echo):
    """Environment that misbehaves at the second turn of episodes whose seed is divisible by three."""

    def __init__(self, how, marks=""):
        super().__init__()
        self.how, self.marks = how, marks

    def step(self, turn):
        if turn.number == 1 and self.seed % 3 == 0:
            if self.how == "hang":
                time.sleep(3600)
            elif self.how == "spin":
                while True:
                    pass
            elif self.how == "exit":
                os._exit(7)
            elif self.how == "raise":
                raise OSError("the backend is down")
            elif self.how == "lie":
                return {"messages": 5, "done": "yes"}
            elif self.how == "killed once":
                mark = Path(self.marks) / str(self.seed)
                if not mark.exists():
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
        return super().step(turn)


class Hostile(Echo):
    """Environment that misbehaves at the second turn or when it is closed, depending on the seed."""

    MISDEEDS = (
        "hangs",
        "crashes",
        "raises",
        "returns a number",
        "says a number",
        "writes where answers go",
        "pays in words",
    )
    AT_THE_END = ("raises", "writes where answers go", "hangs")

    def step(self, turn):
        if turn.number == 1 and self.seed % 10 < len(self.MISDEEDS):
            return self.misdeed(self.MISDEEDS[self.seed % 10])
        return super().step(turn)

    def misdeed(self, what):
        if what == "hangs":
            time.sleep(3600)
        elif what == "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif what == "raises":
            raise OSError("the backend is down")
        elif what == "writes where answers go":
            for descriptor in range(3, 32):
                with contextlib.suppress(OSError):
                    os.write(descriptor, b"no answer")
            return "an answer after something else"
        return {"returns a number": 5, "says a number": {"messages": [5]}, "pays in words": {"reward": "much"}}[what]

    def close(self):
        what = dict(enumerate(self.AT_THE_END, start=len(self.MISDEEDS))).get(self.seed % 10)
        if what is not None:
            self.misdeed(what)


class Dice(Echo):
    """Environment whose answers are not a function of problem, seed and turns."""

    def step(self, turn):
        return f"[{time.monotonic_ns()}]"


class Shares(Echo):
    """Environment that counts the turns of all episodes of its process together."""

    turns = 0

    def step(self, turn):
        Shares.turns += 1
        return f"[{Shares.turns}]"


class Rolls(Echo):
    """Environment that samples the reward, or whether the episode ends, without the seed."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def step(self, turn):
        step, drawn = super().step(turn), random.random()
        return step | ({"reward": drawn} if self.what == "pays" else {"done": drawn < 0.5})


class RollsFirst(Echo):
    """Environment that samples its first message without the seed."""

    def reset(self, problem, seed):
        super().reset(problem, seed)
        return f"begin {random.random()}:"


class ToolError(Exception):
    pass


def price(item: str, count: int = 1) -> str:
    """
    Look up what items cost.

    Args:
        item: What is bought.
        count: How many of it.
    """
    if item == "stone":
        raise ToolError("nobody sells a stone")
    if item == "bug":
        raise RuntimeError("no database")
    return f"{len(item) * count} crowns"


def read(path: str) -> str:
    """
    Read a file.

    Args:
        path: Where it is.
    """
    try:
        return Path(path).read_text()
    except OSError as error:
        raise ToolError(error.strerror) from error


class Unready(Echo):
    """Environment that fails to begin."""

    def reset(self, problem, seed):
        raise FileNotFoundError("no board")


class Awaited(Echo):
    """Environment that answers the first turn of one episode only after another episode has reached its third turn."""

    def __init__(self, marks):
        super().__init__()
        self.marks = Path(marks)

    def step(self, turn):
        if turn.number == 2:
            (self.marks / "third").touch()
        if turn.number == 0:
            try:
                (self.marks / "first").touch(exist_ok=False)
            except FileExistsError:
                return super().step(turn)
            while not (self.marks / "third").exists():
                time.sleep(0.01)
            (self.marks / "waited").touch()
        return super().step(turn)
