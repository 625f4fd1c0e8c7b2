"""Taskset of verifiers, with tasks that fail in several ways. It imports no module of Rheostat."""

import itertools

import verifiers.v1 as vf

__all__ = ["LettersTaskset"]


class LettersData(vf.TaskData):
    number: int
    fails: str = ""


class LettersTask(vf.Task[LettersData]):
    async def setup(self, trace, runtime):
        if self.data.fails == "setup":
            raise RuntimeError("no such repository")

    @vf.reward(weight=2.0)
    async def letters(self, trace) -> float:
        if self.data.fails == "reward":
            raise RuntimeError("no tests were found")
        return float(len(trace.last_reply))


class LettersConfig(vf.TasksetConfig):
    tasks: int | None = 12
    fails: str = ""


class LettersTaskset(vf.Taskset[LettersTask, LettersConfig]):
    INFINITE = True

    @property
    def bounded(self):
        return self.config.tasks is not None or super().bounded

    def load(self):
        numbers = itertools.count() if self.config.tasks is None else range(self.config.tasks)
        for number in numbers:
            fails = self.config.fails if number % 2 == 0 else ""
            data = LettersData(prompt=f"Write {number} letters.", number=number, fails=fails)
            yield LettersTask(data, self.config.task)
