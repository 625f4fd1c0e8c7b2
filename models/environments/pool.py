"""Pool of processes that run environments. A process that hangs, crashes or is killed is restarted.

A restarted process receives all turns of its episodes again.

An error of the environment fails the episode: its score is missing, so the policy is not punished for the error.
Torch-free.
"""

import importlib.util
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Any, Protocol, cast

from rheostat.infra.errors import BadInput, WorkerLost
from rheostat.infra.processes.child import (
    MAX_ENDS,
    ProcessEnded,
    rheostat_interpreter,
    user_interpreter,
)
from rheostat.infra.processes.episodes import DescribedTools, EnvironmentStep, EpisodeProcess, EpisodeRequest
from rheostat.infra.processes.restarting import ChildProgram, RestartingProcess
from rheostat.infra.variants import implementation_of
from rheostat.models.config.environments import McpEnvironment
from rheostat.models.config.episodes import EnvironmentSettings
from rheostat.models.environments.responders import TurnAnswer


class EnvironmentProcess(ChildProgram, Protocol):
    """Child process that runs environments and answers the turns of episodes."""

    @property
    def schemas(self) -> Sequence[object]:
        """Schemas of the environment's tools in the format of chat templates. They are available once the process is
        ready, and only if it was started with `describes`."""

    def step(self, asked: EpisodeRequest) -> tuple[EnvironmentStep | None, str | None]:
        """Answer the last turn of an episode. `asked` contains its problem and all its turns.

        Returns the answer and None, or None and the reason for the failure. Raises ProcessEnded if the process is no
        longer usable.
        """

    def end(self, closed: Sequence[str]) -> None:
        """Delete the environment objects of the episodes `closed`, which are over."""


class ProcessStarter(Protocol):
    """Function that starts a process for one kind of environment."""

    def __call__(self, settings: Any, /, *, describes: DescribedTools) -> EnvironmentProcess:  # noqa: ANN401 -- settings differ by kind
        """Start the process. `describes` selects the tools for which it returns schemas.

        Raises BadInput if the environment cannot be used.
        """


def start_process(settings: EnvironmentSettings, *, describes: DescribedTools = "none") -> EnvironmentProcess:
    """Start a child process that runs the configured environment. `describes` selects whether the process also reports
    the schemas of its tools.

    Raises BadInput if the environment cannot be used.
    """
    return cast(ProcessStarter, implementation_of(settings))(settings, describes=describes)


def user_process(settings: EnvironmentSettings, *, describes: DescribedTools) -> EpisodeProcess:
    """Start a sandboxed child process that runs the user's environment code. Raises BadInput if the sandbox is not
    available."""
    run = settings.run.with_schemas(describes)
    return EpisodeProcess(run, user_interpreter(sandbox=settings.sandboxed_by), seconds=settings.step_seconds)


def server_process(settings: McpEnvironment, *, describes: DescribedTools) -> EpisodeProcess:
    """Start a child process that calls the tools of an MCP server. Raises BadInput if the package `mcp` is not
    installed or a required environment variable is not set."""
    if importlib.util.find_spec("mcp") is None:
        raise BadInput(f"{settings.run.where}: the package mcp is not installed. Run: pip install 'mcp>=2.3,<3'")
    for variable in settings.secrets.values():
        if not os.environ.get(variable):
            raise BadInput(
                f"{settings.run.where}: the environment variable {variable!r}, which contains a secret for the MCP "
                "server, is not set or is empty. Set it before you start the run."
            )
    run = settings.run.with_schemas(describes)
    return EpisodeProcess(run, rheostat_interpreter(), seconds=settings.step_seconds)


class EnvironmentPool:
    """Pool of environment processes that answer the turns of many episodes in parallel.

    Episode n always runs in process n modulo the number of processes, regardless of which other episodes are running.
    """

    def __init__(self, settings: EnvironmentSettings) -> None:
        self._settings = settings
        self._places = [
            RestartingProcess(partial(start_process, settings), what=settings.run.where)
            for _ in range(settings.processes)
        ]
        self._turns = [
            Lock() for _ in self._places
        ]  # one lock per process, because several batches share the processes
        self._threads = ThreadPoolExecutor(settings.processes, thread_name_prefix="environment")
        self.progress = 0
        """Number of turns answered so far."""

    def answer(self, asked: Sequence[EpisodeRequest], numbers: Sequence[int]) -> list[TurnAnswer]:
        """Answer the last turn of each episode in parallel. `numbers` are the episode numbers, from which the process
        of each episode is computed.

        Raises BadInput if the environment cannot be used, and WorkerLost if its process is repeatedly killed from
        outside.
        """
        parts = self._group_by_process(numbers)
        if len(parts) == 1:  # a single process is called directly, so the threads stay free for other batches
            [place] = parts
            return self._answer_in_turn(place, asked)
        answers_by_place = self._threads.map(
            lambda place: self._answer_in_turn(place, [asked[index] for index in parts[place]]), parts
        )
        pairs = [
            zip(parts[place], answers, strict=True) for place, answers in zip(parts, answers_by_place, strict=True)
        ]
        answers_by_index = {index: answered for pair in pairs for index, answered in pair}
        return [answers_by_index[index] for index in range(len(asked))]

    def _group_by_process(self, numbers: Sequence[int]) -> dict[int, list[int]]:
        """Assign episodes to processes. Returns the indices into `numbers` of each process's episodes, by the index of
        the process."""
        parts: dict[int, list[int]] = {}
        for index, number in enumerate(numbers):
            parts.setdefault(number % len(self._places), []).append(index)
        return parts

    def _answer_in_turn(self, place: int, asked: Sequence[EpisodeRequest]) -> list[TurnAnswer]:
        """Answer the episodes one after the other in process number `place`. A lock keeps other threads from using the
        process."""
        with self._turns[place]:
            return [self._answer_one(self._places[place], each) for each in asked]

    def end(self, episodes: Sequence[str], numbers: Sequence[int]) -> None:
        """Delete the environments of finished episodes in the processes that are still running."""
        for place, part in self._group_by_process(numbers).items():
            with self._turns[place]:
                self._end(self._places[place], [episodes[index] for index in part])

    def _end(self, place: RestartingProcess[EnvironmentProcess], episodes: Sequence[str]) -> None:
        """Delete the environments of finished episodes in one process, if it is running. If the process ends during the
        call, it is closed."""
        try:
            if place.is_up:
                place.ready().end(episodes)
        except ProcessEnded:
            place.close()

    def close(self) -> None:
        """Kill all environment processes."""
        for place in self._places:
            place.close()

    def _answer_one(self, place: RestartingProcess[EnvironmentProcess], asked: EpisodeRequest) -> TurnAnswer:
        """Answer the last turn of one episode. If the process ends during the call, it is restarted and the call is
        repeated.

        The episode fails if the process ends `ProcessEnded.num_repeats` times for the same cause. Raises WorkerLost if
        the process has ended `MAX_ENDS` times.
        """
        ends: list[str] = []
        began = time.monotonic()
        while True:
            try:
                step, failure = place.ready().step(asked)
                self.progress += 1
                return TurnAnswer(step, failure or "", time.monotonic() - began)
            except ProcessEnded as end:
                place.close()
                ends.append(end.cause)
                if end.num_repeats is not None and ends.count(end.cause) >= end.num_repeats:
                    late = (
                        f"the environment did not respond within {self._settings.step_seconds:g} s "
                        "(rollout.environment.step_seconds)"
                    )
                    return TurnAnswer(None, late if end.cause == "time" else str(end), time.monotonic() - began)
                if len(ends) == MAX_ENDS:
                    raise WorkerLost(
                        f"{self._settings.run.where}: the process of the environment ended {len(ends)} times in a row "
                        f"for an unknown reason ({', '.join(ends)}). Check that the machine has enough memory and "
                        "that nothing kills the process."
                    ) from end
