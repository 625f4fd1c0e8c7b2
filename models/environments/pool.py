"""The processes of a worker's environments: whoever hangs, crashes or is killed is started again, and told all turns.

What an episode's environment does wrong is the environment's fault, so the episode has failed: its score is missing,
and the policy is not punished for it. Torch-free.
"""

import importlib.util
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Any, Protocol, cast

from infra.errors import BadInput, WorkerLost
from infra.processes.child import MOST_ENDS, Place, ProcessEnded, Served, our_interpreter, users_interpreter
from infra.processes.episodes import Asked, EnvironmentStep, EpisodeProcess
from infra.variants import implementation_of
from models.config.environments import EnvironmentSettings, McpEnvironment
from models.environments.answers import Answered


class Answers(Served, Protocol):
    """What answers turns in a process."""

    @property
    def schemas(self) -> Sequence[object]:
        """Of its tools, as chat templates show them; known once it is ready, if it was started to describe them."""

    def step(self, asked: Asked) -> tuple[EnvironmentStep | None, str | None]:
        """Answer an episode's last turn, or say why not. Raises ProcessEnded where it is of no use any more."""

    def end(self, closed: Sequence[str]) -> None:
        """Close episodes that are over."""


class Starts(Protocol):
    """Starts a process for an environment."""

    def __call__(self, settings: Any, /, *, describes: bool) -> Answers:  # noqa: ANN401 -- its own settings
        """`describes` asks for the schemas of its tools, which takes seconds. Raises BadInput where it cannot work."""


def started(settings: EnvironmentSettings, *, describes: bool = False) -> Answers:
    """Start a process that answers turns. Raises BadInput where it cannot work."""
    return cast(Starts, implementation_of(settings))(settings, describes=describes)


def user_process(settings: EnvironmentSettings, *, describes: bool) -> EpisodeProcess:
    """Start a process with what a user brings. Raises BadInput where there is no sandbox for it."""
    run = settings.run.describing() if describes else settings.run
    return EpisodeProcess(run, users_interpreter(sandbox=settings.sandboxed_by), seconds=settings.step_seconds)


def server_process(settings: McpEnvironment, *, describes: bool) -> EpisodeProcess:
    """Start a process that asks an MCP server. Raises BadInput where its package or a variable is missing."""
    if importlib.util.find_spec("mcp") is None:
        raise BadInput(f"{settings.run.where}: expected the package mcp, found none; pip install 'mcp>=2.3,<3'")
    for variable in settings.secrets.values():
        if not os.environ.get(variable):
            raise BadInput(
                f"{settings.run.where}: expected a value in the environment variable {variable!r}, found none"
            )
    run = settings.run.describing() if describes else settings.run
    return EpisodeProcess(run, our_interpreter(), seconds=settings.step_seconds)


class EnvironmentPool:
    """Answers turns side by side; the n-th episode is in process n modulo their number, whatever the others do."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        self._settings = settings
        self._places = [Place(partial(started, settings), what=settings.run.where) for _ in range(settings.processes)]
        self._turns = [Lock() for _ in self._places]  # batches share the processes
        self._threads = ThreadPoolExecutor(settings.processes, thread_name_prefix="environment")
        self.done = 0
        """Turns answered so far."""

    def answer(self, asked: Sequence[Asked], numbers: Sequence[int]) -> list[Answered]:
        """Have the last turn of each episode answered; `numbers` are those of the episodes.

        Raises BadInput where the environment cannot be used, and WorkerLost where its process is killed by others.
        """
        parts = self._dealt(numbers)
        if len(parts) == 1:  # who waits for one process leaves the threads to the others
            [place] = parts
            return self._in_turn(place, asked)
        told = self._threads.map(lambda place: self._in_turn(place, [asked[index] for index in parts[place]]), parts)
        pairs = [zip(parts[place], answers, strict=True) for place, answers in zip(parts, told, strict=True)]
        found = {index: answered for pair in pairs for index, answered in pair}
        return [found[index] for index in range(len(asked))]

    def _dealt(self, numbers: Sequence[int]) -> dict[int, list[int]]:
        """Say which of the episodes each place has, by their index here."""
        parts: dict[int, list[int]] = {}
        for index, number in enumerate(numbers):
            parts.setdefault(number % len(self._places), []).append(index)
        return parts

    def _in_turn(self, place: int, asked: Sequence[Asked]) -> list[Answered]:
        with self._turns[place]:
            return [self._one(self._places[place], each) for each in asked]

    def end(self, episodes: Sequence[str], numbers: Sequence[int]) -> None:
        """Close what is over where it still lives."""
        for place, part in self._dealt(numbers).items():
            with self._turns[place]:
                self._end(self._places[place], [episodes[index] for index in part])

    def _end(self, place: Place[Answers], episodes: Sequence[str]) -> None:
        try:
            if place.is_up:
                place.ready().end(episodes)
        except ProcessEnded:
            place.close()

    def close(self) -> None:
        """Kill the processes."""
        for place in self._places:
            place.close()

    def _one(self, place: Place[Answers], asked: Asked) -> Answered:
        ends: list[str] = []
        began = time.monotonic()
        while True:
            try:
                step, failure = place.ready().step(asked)
                self.done += 1
                return Answered(step, failure or "", time.monotonic() - began)
            except ProcessEnded as end:
                place.close()
                ends.append(end.cause)
                if end.suffices is not None and ends.count(end.cause) >= end.suffices:
                    late = f"no answer after {self._settings.step_seconds:g} s"
                    return Answered(None, late if end.cause == "time" else str(end), time.monotonic() - began)
                if len(ends) == MOST_ENDS:
                    raise WorkerLost(
                        f"{self._settings.run.where}: its process was ended {len(ends)} times in a row, by "
                        f"{', '.join(ends)}. Who did it is not known: see that the machine has the memory, and that "
                        "nothing kills the process"
                    ) from end
