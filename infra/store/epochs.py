"""The epochs of a run: each holder begins one, and whoever commits under an older one is shut out."""

import re
from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock
from typing import Generic, TypeVar

from infra.store.checksums import seal
from infra.store.manifests import provenance_here
from infra.store.storage import Objects

LEASES = "lease/"
_LEASE = re.compile(r"(\d{6,})\.json")

T = TypeVar("T")


class Shared(Generic[T]):
    """A question whose answer serves all who had asked before it was put: nobody gets one that is older."""

    def __init__(self, question: Callable[[], T]) -> None:
        self._question = question
        self._turn, self._asking = Lock(), Lock()
        self._next: Future[T] | None = None
        """Answer to those who asked while the question before was under way."""

    def ask(self) -> T:
        """Put the question, or wait for the answer of the thread that is about to."""
        with self._turn:
            answer, leads = self._next or Future[T](), self._next is None
            self._next = answer
        if leads:
            with self._asking:
                with self._turn:
                    self._next = None
                try:
                    answer.set_result(self._question())
                except BaseException as error:
                    answer.set_exception(error)
        return answer.result()


class Epoch:
    """An epoch of a run, for who commits under it."""

    def __init__(self, store: Objects, number: int, *, renewed: bool) -> None:
        """Name an epoch; who holds a lock that is `renewed` elsewhere sees by that whether the run is still there."""
        self.number = number
        self._store, self._renewed = store, renewed
        self._look = Shared(self._over)

    def is_over(self) -> bool:
        """Whether another has begun, or the run is gone; threads that ask at the same time share a look."""
        return self._look.ask()

    def _over(self) -> bool:
        if self._renewed:
            return self._store.exists(_key(self.number + 1))
        follows, is_there = self._store.exist([_key(self.number + 1), _key(self.number)])
        return follows or not is_there


def newest_epoch(store: Objects) -> int:
    """Number of the epoch that began last; 0 before the first."""
    names = store.children(LEASES.rstrip("/"))
    return max((int(lease[1]) for name in names if (lease := _LEASE.fullmatch(name))), default=0)


def begin_epoch(store: Objects) -> int:
    """Begin the next epoch, and return its number."""
    while True:
        number, here = newest_epoch(store) + 1, provenance_here()
        if store.put(_key(number), seal({"epoch": number, "host": here.host, "created": here.created})):
            return number


def _key(number: int) -> str:
    return f"{LEASES}{number:06d}.json"
