"""A lease on a name in a bucket: compare-and-swap, a deadline by the server's own clock, renewal until it is released.

Who holds it renews it, and has lost it, by its own clock, before another may take it by the server's. A process that
was stopped meanwhile finds out when it asks; what it commits without asking is refused by the run's epochs.
"""

import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from threading import Event, Thread

from infra.errors import Damaged, Fenced, StoreFailed
from infra.store.bucket import Bucket
from infra.store.disk import Holding, holding_of

LEASE_SECONDS = 30.0
"""A term: how long a run waits for a driver that died on another machine, and a driver for a server that is away."""
_RENEWALS = 6
"""In a term."""
_SLACK = timedelta(seconds=2)
"""The server's times are cut to seconds."""

logger = logging.getLogger(__name__)


@dataclass
class BucketLease:
    """The lease of this process."""

    bucket: Bucket
    key: str
    seconds: float
    version: str
    until: float
    """When it is over, by this process's clock that nobody sets."""
    lost: str = ""

    def check(self) -> None:
        """Raise Fenced once the lease is lost, or was not renewed within its term."""
        if self.lost or time.monotonic() >= self.until:
            why = self.lost or f"it was not renewed for {self.seconds:g} s"
            raise Fenced(f"{self.key!r} in {self.bucket.uri}: this process has lost its lease: {why}")

    def replace(self, *, seconds: float) -> None:
        """Begin another term; one of no length lets others have the name."""
        began = time.monotonic()
        version = self.bucket.replace(self.key, _content(seconds), version=self.version)
        if version is None:
            self.lost = "another has taken it"
        else:
            self.version, self.until = version, began + seconds


@contextmanager
def hold_lease(bucket: Bucket, key: str, *, seconds: float = LEASE_SECONDS) -> Iterator[BucketLease | None]:
    """Hold a name as long as the context lasts; None if another process has it, and renews it.

    One that nobody renews any more is waited for until its term is over.
    """
    lease = _take(bucket, key, seconds)
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
        _try(lease, seconds=0)


def look_at_lease(bucket: Bucket, key: str) -> Holding:
    """Say who holds a name, or let its term end without giving it up."""
    found = bucket.read(key)
    if found is None:
        return Holding("free")
    body, stored = found
    term = _term(body, where=f"{key!r} in {bucket.uri}")
    if not term:
        return Holding("free")
    is_over = bucket.now() > stored.modified + timedelta(seconds=term) + _SLACK
    return holding_of(body, "left" if is_over else "held")


def _renew(lease: BucketLease, ended: Event) -> None:
    while not lease.lost and not ended.wait(lease.seconds / _RENEWALS):
        _try(lease, seconds=lease.seconds)


def _try(lease: BucketLease, *, seconds: float) -> None:
    """Replace a lease; if the server does not answer it ends by itself."""
    try:
        if not lease.lost:
            lease.replace(seconds=seconds)
    except StoreFailed as error:
        logger.warning("lease %s: %s", lease.key, error)


def _take(bucket: Bucket, key: str, seconds: float) -> BucketLease | None:
    bucket.quotes_tags()
    first, free_at, told = "", 0.0, False
    while True:
        began = time.monotonic()
        found = bucket.read(key)
        if found is None:
            version = bucket.create(key, _content(seconds))
        else:
            body, stored = found
            term = _term(body, where=f"{key!r} in {bucket.uri}")
            if not first:
                first, over = stored.tag, stored.modified + timedelta(seconds=term) + _SLACK
                free_at = began + (over - bucket.now()).total_seconds() if term else began
            if term and stored.tag != first:  # it was renewed meanwhile
                return None
            if term and began < free_at:
                if not told:
                    logger.info("%s in %s: waiting %.0f s at most for who holds it", key, bucket.uri, free_at - began)
                told = True
                time.sleep(min(free_at - began, term / _RENEWALS / 2))
                continue
            version = bucket.replace(key, _content(seconds), version=stored.tag)
        return None if version is None else BucketLease(bucket, key, seconds, version, began + seconds)


def _content(seconds: float) -> bytes:
    """Who holds a lease, for people, and for how long; no two are equal."""
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "seconds": seconds, "token": secrets.token_hex(16)}
    return json.dumps(holder).encode()


def _term(content: bytes, *, where: str) -> float:
    try:
        return float(json.loads(content)["seconds"])
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{where}: expected a lease, found {content[:80]!r}") from error
