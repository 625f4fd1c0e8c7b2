"""What can go wrong, by name.

RheostatError
├── BadInput            what a user wrote; one line, exit code 2, nothing written
│   ├── RunHeld         another process holds the run
│   └── RunChanged      the run was made by another configuration
├── Damaged             an artefact is missing, torn or not what its digest says
├── StoreFailed         the store's medium fails: disk full, read-only, I/O error; resume when it is mended
├── Fenced              a newer controller has taken the run over
├── HolderLost          a controller in a process of its own no longer hears of the one that holds the run
├── Conflict            two different results were committed under one name
├── ClusterFailed       the cluster that hosts the workers did not start, cannot be reached, or failed
├── ApiFailed           the Prefect API did not start or cannot be reached
├── InstallFailed       an engine's environment could not be made; the same command makes it again
├── EndpointDown        a service that a worker asks does not answer; the same work can be done later
├── WorkerFailed        a worker raised; the work itself is at fault
├── WorkerLost          a worker died; the work can be done again elsewhere
│   ├── WorkerStalled   a worker is alive but made no progress within its deadline
│   └── NodeLost        the machine of a worker's slot has left the cluster; its work goes to other slots
├── WorkerAsleep        a worker of a fleet fell asleep before the work reached it; another does it
├── Quarantined         a stage refused its result (too many failures, nothing to learn from)
├── RunsFailed          some runs of a sweep failed; the others are done
├── BudgetSpent         a run has taken what its budget allows; with a larger one it goes on; exit code 3
└── AlarmStopped        an alarm ended a run; with another bound it goes on; exit code 4
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Final

from infra.untrusted_text import visible


class RheostatError(Exception):
    """Base of every error that Rheostat raises on purpose."""

    exit_code: ClassVar[int] = 1
    """Of a command that it ends."""

    def __str__(self) -> str:
        """Return the message, which may quote what others wrote, with all of its characters visible."""
        return visible(super().__str__())


class BadInput(RheostatError, ValueError):
    """What a user wrote is wrong; the message says what was expected, what came, and where."""

    exit_code = 2


COMPLAINTS: Final = 6
"""Different ones that are told together."""
ALSO: Final = 3
"""Further places of one that are named."""


class Complaints:
    """What is wrong at several places, such as lines of a file, kept until all is known and told in one line."""

    def __init__(self) -> None:
        self._places: dict[str, list[str]] = {}
        self._count = 0

    @contextmanager
    def kept(self, place: str) -> Iterator[None]:
        """Keep what is wrong at a place, and go on behind the block."""
        try:
            yield
        except BadInput as error:
            self._count += 1
            what = str(error).removeprefix(f"{place}: ")
            if what in self._places or len(self._places) < COMPLAINTS:
                places = self._places.setdefault(what, [])
                places += [place] if len(places) <= ALSO else []

    def check(self) -> None:
        """Raise BadInput if anything is wrong: each complaint with its places, as far as a line can be read."""
        if not self._count:
            return
        told = [
            f"{place}: {what}" + (f" (also {', '.join(also)})" if also else "")
            for what, (place, *also) in self._places.items()
        ]
        more = self._count - sum(map(len, self._places.values()))
        raise BadInput("; ".join(told) + (f"; and {more} more" if more else ""))


class RunHeld(BadInput):
    """Another live process holds the run."""


class RunChanged(BadInput):
    """The run on disk was made by another configuration."""


class Damaged(RheostatError):
    """An artefact is missing, torn, or does not match its digest."""


class StoreFailed(RheostatError):
    """The store's medium cannot be read or written; nothing torn was published, and the run resumes when it can."""


class Fenced(RheostatError):
    """A newer controller epoch has taken the run over; this one may not commit."""


class HolderLost(RheostatError):
    """The process that holds a run has let a controller in another process hear nothing for too long."""


class Conflict(RheostatError):
    """Two different results were committed under one manifest key."""


class ClusterFailed(RheostatError):
    """The cluster that hosts the workers did not start, or cannot be reached."""


class ApiFailed(RheostatError):
    """The Prefect API did not start, or cannot be reached."""


class InstallFailed(RheostatError):
    """An engine's environment could not be made; what is half made is made anew by the same command."""


class EndpointDown(RheostatError, ConnectionError):
    """A service that a worker asks did not answer, however often it was asked; the work can be done again later.

    An OSError, as all of the outside world's failures are: nothing is wrong with the work or with the worker.
    """


class WorkerFailed(RheostatError):
    """A worker raised while doing its work; doing it again elsewhere would raise again."""


class WorkerLost(RheostatError):
    """A worker process died; its work can be done again by another."""


class WorkerStalled(WorkerLost):
    """A worker is alive but reported no progress within its deadline."""


class NodeLost(WorkerLost):
    """The machine that a worker was to start on has left the cluster."""


class WorkerAsleep(RheostatError):
    """A worker of a fleet fell asleep before the work reached it."""


class Quarantined(RheostatError):
    """A stage refused its own result rather than pass it on."""


class RunsFailed(RheostatError):
    """Some runs of a sweep failed, each for a reason of its own; the same command goes on with them."""


class BudgetSpent(RheostatError):
    """A run has reached a limit of its budget, after an iteration and before the next; a larger one lets it go on."""

    exit_code = 3


class AlarmStopped(RheostatError):
    """An alarm has ended a run, after an iteration and before the next; the run goes on when the alarm is changed."""

    exit_code = 4


def first_cause(error: BaseException) -> BaseException:
    """Return the error itself, or the first inside a group of errors that came together, ours before others."""
    while isinstance(error, BaseExceptionGroup):
        ours, _ = error.split(RheostatError)
        error = (ours or error).exceptions[0]
    return error
