"""Lease on a key in a bucket. A lease is a lock that expires unless its holder renews it, which is done by
compare-and-swap.

The holder renews its lease in a thread. If a lease expires, because the server or this process was suspended, the
holder must renew the lease before it continues. The renewal succeeds only if no other process has taken the key in the
meantime. If a process commits without this check, its commits are refused because a newer epoch has begun.
"""

import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Event, Lock, Thread

from rheostat.infra.errors import Damaged, Fenced, StoreFailed
from rheostat.infra.store.bucket import Bucket
from rheostat.infra.store.contracts import LockState
from rheostat.infra.store.disk import read_lock_record

LEASE_SECONDS = 30.0
"""Seconds after which a lease (a lock that must be renewed) expires. If the process that trains a run dies, another
machine can continue the run after this time. A process may commit for this time without a response to its renewals."""
_RENEWALS = 6
"""Number of times that a lease (a lock that must be renewed) is renewed within its lifetime."""
_SLACK = timedelta(seconds=2)
"""Tolerance for comparing times of the server, which have a resolution of one second."""

logger = logging.getLogger(__name__)


@dataclass
class BucketLease:
    """Lease that this process has on a key in a bucket. A lease is a lock that expires if it is not renewed."""

    bucket: Bucket
    key: str
    seconds: float
    version: str
    until: float
    """Time at which the lease (lock) expires if it is not renewed, in seconds of this machine's monotonic clock."""
    owner: str
    """Random token that identifies lease records that this process has written."""
    is_lost: bool = False
    """Whether another process has acquired the lease since."""
    _turn: Lock = field(default_factory=Lock)
    """Lock that a thread acquires to renew the lease, so that only one thread does so at a time."""

    def check(self) -> None:
        """Check that this process still has the lease (a lock that expires). If the lease has expired, it is renewed.

        Raises Fenced if another process has acquired the lease, and StoreFailed if the server does not respond.
        """
        if not self.is_lost and time.monotonic() >= self.until:
            self.renew(self.seconds)
        if self.is_lost:
            raise Fenced(
                f"this process has lost its lock on {self.key!r} in {self.bucket.uri}, because another process has "
                "taken it. Only one process can train a run, so let that process continue"
            )

    def renew(self, seconds: float) -> None:
        """Extend the lease (a lock that expires) until `seconds` from now, unless another process has acquired it. With
        0 seconds, the lease is released."""
        with self._turn:
            began = time.monotonic()
            if self.is_lost:
                return
            version = self.bucket.replace(self.key, _content(seconds, self.owner), version=self.version)
            if version is None and (unacknowledged := self._find_own_record()):
                version = self.bucket.replace(self.key, _content(seconds, self.owner), version=unacknowledged)
            if version is None:
                self.is_lost = True
            else:
                self.version, self.until = version, began + seconds

    def _find_own_record(self) -> str:
        """Return the ETag of the stored record of the lease (lock) if this process wrote it, otherwise "". This finds
        out whether a renewal succeeded although its response was lost."""
        current = self.bucket.read(self.key)
        return current[1].tag if current is not None and json.loads(current[0]).get("owner") == self.owner else ""


@contextmanager
def acquire_lease(bucket: Bucket, key: str, *, seconds: float = LEASE_SECONDS) -> Iterator[BucketLease | None]:
    """Run the block while this process has a lease on a key, and yield the lease. A lease is a lock that expires, and
    is renewed in the background. Yield None if another live process has a lease on the key.

    If another process has a lease but does not renew it, wait until this lease expires.
    """
    lease = _acquire(bucket, key, seconds)
    if lease is None:
        yield None
        return
    ended = Event()
    renewing = Thread(target=_renew, args=(lease, ended), name=f"lease {key}", daemon=True)
    renewing.start()
    try:
        yield lease
    finally:
        ended.set()
        renewing.join()
        _try_renew(lease, seconds=0)


def read_lease_state(bucket: Bucket, key: str) -> LockState:
    """Return the state of the lease on a key, and the process that has the lease. A lease is a lock that expires. An
    expired lease that was not released has the state "left"."""
    current = bucket.read(key)
    if current is None:
        return LockState("free")
    body, stored = current
    term = _term(body, where=f"{key!r} in {bucket.uri}")
    if not term:
        return LockState("free")
    is_over = bucket.now() > stored.modified + timedelta(seconds=term) + _SLACK
    return read_lock_record(body, "left" if is_over else "held")


def _renew(lease: BucketLease, ended: Event) -> None:
    while not lease.is_lost and not ended.wait(lease.seconds / _RENEWALS):
        _try_renew(lease, seconds=lease.seconds)


def _try_renew(lease: BucketLease, *, seconds: float) -> None:
    """Renew a lease (a lock that expires), or release it if `seconds` is 0. Log a warning if the server does not
    respond."""
    try:
        lease.renew(seconds)
    except StoreFailed as error:
        logger.warning("the lock on %s could not be renewed or released: %s", lease.key, error)


def _acquire(bucket: Bucket, key: str, seconds: float) -> BucketLease | None:
    bucket.quotes_etags()
    first, free_at, is_logged = "", 0.0, False
    owner = secrets.token_hex(16)
    while True:
        began = time.monotonic()
        current = bucket.read(key)
        if current is None:
            version = bucket.create(key, _content(seconds, owner))
        else:
            body, stored = current
            term = _term(body, where=f"{key!r} in {bucket.uri}")
            if not first:
                first, over = stored.tag, stored.modified + timedelta(seconds=term) + _SLACK
                free_at = began + (over - bucket.now()).total_seconds() if term else began
            if term and stored.tag != first:  # another process renewed the lease meanwhile
                return None
            if term and began < free_at:
                if not is_logged:
                    logger.info(
                        "%s in %s is locked by another process: waiting up to %.0f s", key, bucket.uri, free_at - began
                    )
                is_logged = True
                time.sleep(min(free_at - began, term / _RENEWALS / 2))
                continue
            version = bucket.replace(key, _content(seconds, owner), version=stored.tag)
        return None if version is None else BucketLease(bucket, key, seconds, version, began + seconds, owner)


def _content(seconds: float, owner: str) -> bytes:
    """Return the content of a new record of a lease (a lock that expires): the process that has the lease, and the
    seconds until it expires. A random token makes every record different."""
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "seconds": seconds, "owner": owner}
    return json.dumps(holder | {"token": secrets.token_hex(16)}).encode()


def _term(content: bytes, *, where: str) -> float:
    try:
        return float(json.loads(content)["seconds"])
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(
            f"{where} must contain the record of a lock, but it contains {content[:80]!r}. If no process uses the "
            "run, delete this object"
        ) from error
