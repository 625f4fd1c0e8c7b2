"""Errors that Rheostat raises on purpose.

RheostatError
├── BadInput            a user's input is wrong; one line, exit code 2, nothing was written
│   ├── RunLocked       another process has locked the run
│   └── RunChanged      the run was created from another configuration
├── Damaged             a stored file is missing, incomplete or does not match its digest
├── StoreFailed         the store fails: disk full, read-only, I/O error; the run can be resumed
├── Fenced              a newer process has taken over the run
├── HolderLost          a process that runs one role has lost contact with the process that locked the run
├── Conflict            two different results were committed under the same key
├── ClusterFailed       the cluster of the workers did not start, cannot be reached, or failed
├── ApiFailed           the Prefect API did not start or cannot be reached
├── InstallFailed       the environment of an engine could not be created; the same command can be run again
├── EndpointDown        a service that a worker calls does not respond; the work can be done later
├── WorkerFailed        a worker raised an error; the work would fail on every worker
├── WorkerLost          a worker died; another worker can do the work
│   ├── WorkerStalled   a worker is alive but has made no progress for too long
│   └── NodeLost        the machine of a worker has left the cluster; other workers do its work
├── WorkerAsleep        a worker was put to sleep before the work arrived; another worker does it
├── Quarantined         a stage does not pass on its result (too many failures, no informative groups)
├── RunsFailed          some runs of a sweep failed; the other runs have finished
├── BudgetSpent         a run has used its budget; it continues with a larger budget; exit code 3
└── AlarmStopped        an alarm ended a run; it continues after the alarm was changed; exit code 4
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Final

from rheostat.infra.untrusted_text import make_visible


class RheostatError(Exception):
    """Base class of all errors that Rheostat raises intentionally."""

    exit_code: ClassVar[int] = 1
    """Exit code of a command that ends with this error."""

    def __str__(self) -> str:
        """Return the message with control characters escaped, because the message may quote untrusted text."""
        return make_visible(super().__str__())


class BadInput(RheostatError, ValueError):
    """Raised when something that the user provided, such as a setting or a file, is wrong. The message says where the
    input is, what was expected and what was found."""

    exit_code = 2


MAX_PROBLEMS: Final = 6
"""Maximum number of different problems that one message lists."""
MAX_OTHER_PLACES: Final = 3
"""Maximum number of locations that one message lists for the same problem, in addition to the first location."""


class InputErrors:
    """Collector of input errors from several places, such as the lines of a file. It reports all of them in one
    message."""

    def __init__(self) -> None:
        self._places: dict[str, list[str]] = {}
        self._count = 0

    @contextmanager
    def collect(self, place: str) -> Iterator[None]:
        """Run the block, which reads one place of the input. If the block raises BadInput, record the error for the
        place and continue."""
        try:
            yield
        except BadInput as error:
            self._count += 1
            what = str(error).removeprefix(f"{place}: ")
            if what in self._places or len(self._places) < MAX_PROBLEMS:
                places = self._places.setdefault(what, [])
                places += [place] if len(places) <= MAX_OTHER_PLACES else []

    def check(self) -> None:
        """Raise one BadInput that lists all recorded errors with their places. Do nothing if there are none."""
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
    """Raised when the settings differ from the configuration with which the stored run was created."""


class Damaged(RheostatError):
    """Raised when a stored file is missing, incomplete, or does not match its digest."""


class StoreFailed(RheostatError):
    """Raised when the store cannot be read or written. Everything stored so far is complete, and the run can be
    resumed."""


class Fenced(RheostatError):
    """Raised when this process may no longer write results of a run, because another process has locked the run in the
    meantime."""


class HolderLost(RheostatError):
    """Raised when a controller (a flow that runs one role) has not heard for too long from the process that has locked
    the run."""


class Conflict(RheostatError):
    """Raised when a result differs from the result that is already stored under the same key of a run."""


class ClusterFailed(RheostatError):
    """Raised when the Ray cluster in which the workers run did not start, cannot be reached, or failed."""


class ApiFailed(RheostatError):
    """Raised when the Prefect API did not start or cannot be reached."""


class InstallFailed(RheostatError):
    """Raised when the environment of an engine could not be created. The same command can be run again."""


class EndpointDown(RheostatError, ConnectionError):
    """Raised when an external service, such as a judge's endpoint, did not respond even after retries. The work can be
    done later.

    This error is an OSError, like all failures of external services, because neither the work nor the worker caused it.
    """


class WorkerFailed(RheostatError):
    """Raised when the code of a worker raised an error. The same work would fail again on another worker, so it is not
    retried."""


class WorkerLost(RheostatError):
    """Raised when a worker process died. Its work can be done again by another worker."""


class WorkerStalled(WorkerLost):
    """Raised when a worker is alive but has made no progress for too long."""


class NodeLost(WorkerLost):
    """Raised when a worker cannot be started because its machine has left the cluster."""


class WorkerAsleep(RheostatError):
    """Raised when work reaches a worker that was put to sleep (freed its memory) shortly before."""


class Quarantined(RheostatError):
    """Raised when the result of a stage is withheld from later stages, for example because too many completions
    failed."""


class RunsFailed(RheostatError):
    """Raised when some runs of a sweep failed. The same command can be run again to continue these runs."""


class BudgetSpent(RheostatError):
    """Raised at the end of an iteration when the run has reached a limit of its budget. The run can continue with a
    larger budget."""

    exit_code = 3


class AlarmStopped(RheostatError):
    """Raised at the end of an iteration when an alarm, such as one for a collapsing entropy, ends the run. The run can
    continue after a change of the alarm's setting."""

    exit_code = 4


def first_cause(error: BaseException) -> BaseException:
    """Return the error that should be reported to the user. For an exception group, this is the first error in it, or
    the first error of Rheostat if there is one. Any other error is returned unchanged."""
    while isinstance(error, BaseExceptionGroup):
        ours, _ = error.split(RheostatError)
        error = (ours or error).exceptions[0]
    return error


class DeprecatedSpelling(FutureWarning):
    """Category of warnings about deprecated spellings in a configuration: the old name of a renamed key or value, or a
    path relative to the working directory instead of the file's folder."""
