"""Epochs of a run: numbers that increase whenever a process locks the run. Commits from processes of older epochs are
refused."""

import re
from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock
from typing import Generic, TypeVar

from rheostat.infra.store.checksums import seal
from rheostat.infra.store.contracts import Objects
from rheostat.infra.store.manifests import provenance_here

LEASES = "lease/"
_LEASE = re.compile(r"(\d{6,})\.json")

T = TypeVar("T")


class SharedCall(Generic[T]):
    """Function call whose result is shared by all threads that need the result at about the same time.

    The function is always called after each of these threads has asked for the result, so that no thread gets an
    outdated result.
    """

    def __init__(self, question: Callable[[], T]) -> None:
        self._question = question
        self._turn, self._asking = Lock(), Lock()
        self._next: Future[T] | None = None
        """Result for the threads that arrived while the previous call was running."""

    def call(self) -> T:
        """Return a result of the function that was computed after this call began. Either call the function, or wait
        for a call that another thread is about to start. Raises the function's error."""
        with self._turn:
            answer, is_caller = self._next or Future[T](), self._next is None
            self._next = answer
        if is_caller:
            with self._asking:
                with self._turn:
                    self._next = None
                try:
                    answer.set_result(self._question())
                except BaseException as error:
                    answer.set_exception(error)
        return answer.result()


class Epoch:
    """Epoch of a run: the period from one process locking the run until another process locks it. A process may only
    write results while its epoch lasts."""

    def __init__(self, store: Objects, number: int, *, renewed: bool) -> None:
        """Create the epoch with this number. Set `renewed` if a lease is renewed regularly. The renewals already show
        whether the run still exists."""
        self.number = number
        self._store, self._renewed = store, renewed
        self._shared_query = SharedCall(self._query_is_over)

    def is_over(self) -> bool:
        """Return whether another process has locked the run (which begins a new epoch), or the run was deleted. Threads
        that call this at the same time share one query to the store."""
        return self._shared_query.call()

    def _query_is_over(self) -> bool:
        if self._renewed:
            return self._store.exists(_key(self.number + 1))
        follows, is_there = self._store.exist([_key(self.number + 1), _key(self.number)])
        return follows or not is_there


def newest_epoch(store: Objects) -> int:
    """Return the number of the newest epoch of a run, or 0 if none has begun. A new epoch begins each time a process
    locks the run in order to write."""
    names = store.children(LEASES.rstrip("/"))
    return max((int(lease[1]) for name in names if (lease := _LEASE.fullmatch(name))), default=0)


def begin_epoch(store: Objects) -> int:
    """Begin the next epoch of a run, and return its number. From now on, processes that locked the run earlier can no
    longer write results."""
    while True:
        number, here = newest_epoch(store) + 1, provenance_here()
        if store.put(_key(number), seal({"epoch": number, "host": here.host, "created": here.created})):
            return number


def _key(number: int) -> str:
    return f"{LEASES}{number:06d}.json"
