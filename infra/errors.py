"""Errors that Rheostat raises on purpose.

RheostatError
├── BadInput            wrong input of a user; one line, exit code 2, nothing written
│   ├── RunLocked       another process has locked the run
│   └── RunChanged      the run was created from another configuration
├── Damaged             an artifact is missing, torn or does not match its digest
├── StoreFailed         the store's medium fails: disk full, read-only, I/O error; resume when it works again
├── Fenced              a newer controller has taken over the run
├── HolderLost          a controller in another process has lost contact with the process that locked the run
├── Conflict            two different results were committed under one name
├── ClusterFailed       the cluster of the workers did not start, cannot be reached, or failed
├── ApiFailed           the Prefect API did not start or cannot be reached
├── InstallFailed       the environment of an engine could not be created; the same command tries again
├── EndpointDown        a service that a worker calls does not respond; the same work can be done later
├── WorkerFailed        a worker raised an error; the work itself is at fault
├── WorkerLost          a worker died; the work can be done again elsewhere
│   ├── WorkerStalled   a worker is alive but made no progress within its deadline
│   └── NodeLost        the machine of a worker's slot has left the cluster; its work goes to other slots
├── WorkerAsleep        a worker of a fleet fell asleep before the work arrived; another worker does it
├── Quarantined         a stage refused its result (too many failures, no informative groups)
├── RunsFailed          some runs of a sweep failed; the others are done
├── BudgetSpent         a run has used its budget; with a larger budget it continues; exit code 3
└── AlarmStopped        an alarm ended a run; with another bound it continues; exit code 4
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Final

from infra.untrusted_text import make_visible


class RheostatError(Exception):
    """Base of every error that Rheostat raises on purpose."""

    exit_code: ClassVar[int] = 1
    """Exit code of a command that ends with this error."""

    def __str__(self) -> str:
        """Return the message with control characters made visible, because it may quote untrusted text."""
        return make_visible(super().__str__())


class BadInput(RheostatError, ValueError):
    """Raised when a user's input is wrong. The message names the place, the expected value and the actual value."""

    exit_code = 2


MAX_PROBLEMS: Final = 6
"""Maximum number of different problems in one message."""
MAX_OTHER_PLACES: Final = 3
"""Maximum number of further places that are listed for one problem."""


class InputErrors:
    """Collector of problems at several places, such as lines of a file. They are reported together in one line."""

    def __init__(self) -> None:
        self._places: dict[str, list[str]] = {}
        self._count = 0

    @contextmanager
    def collect(self, place: str) -> Iterator[None]:
        """Run the block and store a BadInput that it raises as the problem of this place."""
        try:
            yield
        except BadInput as error:
            self._count += 1
            what = str(error).removeprefix(f"{place}: ")
            if what in self._places or len(self._places) < MAX_PROBLEMS:
                places = self._places.setdefault(what, [])
                places += [place] if len(places) <= MAX_OTHER_PLACES else []

    def check(self) -> None:
        """Raise BadInput with the stored problems and their places, or do nothing if there are none."""
        if not self._count:
            return
        lines = [
            f"{place}: {what}" + (f" (also {', '.join(also)})" if also else "")
            for what, (place, *also) in self._places.items()
        ]
        more = self._count - sum(map(len, self._places.values()))
        raise BadInput("; ".join(lines) + (f"; and {more} more" if more else ""))


class RunLocked(BadInput):
    """Raised when another live process has locked the run."""


class RunChanged(BadInput):
    """Raised when the stored run was created from another configuration."""


class Damaged(RheostatError):
    """Raised when an artifact is missing, torn, or does not match its digest."""


class StoreFailed(RheostatError):
    """Raised when the store's medium cannot be read or written. Nothing torn was published, and the run can resume."""


class Fenced(RheostatError):
    """Raised when a newer controller epoch has taken over the run, so that this one may not commit."""


class HolderLost(RheostatError):
    """Raised when a controller in another process has lost contact for too long with the process that locked
    the run."""


class Conflict(RheostatError):
    """Raised when two different results are committed under one manifest key."""


class ClusterFailed(RheostatError):
    """Raised when the cluster of the workers did not start, cannot be reached, or failed."""


class ApiFailed(RheostatError):
    """Raised when the Prefect API did not start or cannot be reached."""


class InstallFailed(RheostatError):
    """Raised when the environment of an engine could not be created. The same command creates it again."""


class EndpointDown(RheostatError, ConnectionError):
    """Raised when a service that a worker calls did not respond, even after retries. The work can be done again later.

    It is an OSError, like all failures of external services: neither the work nor the worker is at fault.
    """


class WorkerFailed(RheostatError):
    """Raised when a worker raised an error in its work. Running the work elsewhere would raise the error again."""


class WorkerLost(RheostatError):
    """Raised when a worker process died. Another worker can do the work again."""


class WorkerStalled(WorkerLost):
    """Raised when a worker is alive but made no progress within its deadline."""


class NodeLost(WorkerLost):
    """Raised when the machine on which a worker was to start has left the cluster."""


class WorkerAsleep(RheostatError):
    """Raised when a worker of a fleet fell asleep before the work arrived."""


class Quarantined(RheostatError):
    """Raised when a stage refuses to pass on its result."""


class RunsFailed(RheostatError):
    """Raised when some runs of a sweep failed, possibly for different reasons. The same command continues with them."""


class BudgetSpent(RheostatError):
    """Raised when a run has reached a limit of its budget, after an iteration. With a larger budget the run
    continues."""

    exit_code = 3


class AlarmStopped(RheostatError):
    """Raised when an alarm has ended a run after an iteration. The run continues when the alarm is changed."""

    exit_code = 4


def first_cause(error: BaseException) -> BaseException:
    """Return the error itself, or the first error in an exception group, preferring errors of Rheostat."""
    while isinstance(error, BaseExceptionGroup):
        ours, _ = error.split(RheostatError)
        error = (ours or error).exceptions[0]
    return error


class DeprecatedSpelling(FutureWarning):
    """Category of the warning about the old name of a renamed configuration key or value."""
