"""Child processes that are started when they are needed, and started again after they have ended."""

from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

from rheostat.infra.errors import WorkerFailed
from rheostat.infra.processes.child import ProcessEnded

MAX_STARTS: Final = 3
"""Maximum number of attempts to start a child process that dies while it imports users' functions."""


class ChildProgram(Protocol):
    """Interface of the child processes (for functions, programs, environments) that `RestartingProcess` starts."""

    def ready(self) -> None:
        """Wait until the process can be used. Raises BadInput if its code is unusable, ProcessEnded if it ends."""

    def kill(self) -> None:
        """Kill the process."""


Process = TypeVar("Process", bound=ChildProgram)


class RestartingProcess(Generic[Process]):
    """Wrapper that starts a child process when it is needed, and starts it again after it has ended."""

    def __init__(self, start: Callable[[], Process], *, what: str) -> None:
        self._start, self._what = start, what
        self._process: Process | None = None
        self._is_ready = False

    @property
    def is_up(self) -> bool:
        """Whether the process was running and had loaded its code when it was last used."""
        return self._process is not None and self._is_ready

    def start(self) -> None:
        """Start the process if it is not running."""
        if self._process is None:
            self._process = self._start()
            self._is_ready = False

    def ready(self) -> Process:
        """Start the process if it is not running, and return it after its imports. If it dies meanwhile, try again.

        Raises WorkerFailed after `MAX_STARTS` attempts.
        """
        for attempt in range(MAX_STARTS):
            self.start()
            assert self._process is not None, "the process was started"
            if self._is_ready:
                break
            try:
                self._process.ready()
                self._is_ready = True
                break
            except ProcessEnded as end:
                self.close()
                if attempt + 1 == MAX_STARTS:
                    what = f"{self._what}: the import of the code failed {MAX_STARTS} times"
                    raise WorkerFailed(f"{what}: {end}") from None
            except BaseException:
                self.close()
                raise
        assert self._process is not None, "the process is ready"
        return self._process

    def close(self) -> None:
        """Kill the process and its descendants. Do nothing if the process is not running."""
        if self._process is not None:
            self._process.kill()
            self._process = None
