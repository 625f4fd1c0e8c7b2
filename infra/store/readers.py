"""Protection of stored folders (bundles), such as policies, while a process reads them although the run continues.

Retention and garbage collection do not delete the files of these bundles. A reader locks a key below `readers/` while
it reads. The lock ends at the latest when the reader's process ends. Once it has the lock, the reader checks for a
tombstone (the record of a deletion). A deleting process checks for readers after it has committed the tombstone.
Therefore at least one of the two processes notices the other.
"""

import logging
import secrets
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

from rheostat.infra.errors import StoreFailed
from rheostat.infra.store.bundles import CONTENTS, BundleRef
from rheostat.infra.store.contracts import Store
from rheostat.infra.store.forks import owner_of

READERS: Final = "readers/"
"""Prefix of the keys that processes lock while they read a bundle (stored folder). It is followed by 16 digits of the
bundle's digest, a dash and a random number."""
_ATTEMPTS: Final = 5

logger = logging.getLogger(__name__)


@contextmanager
def keep_while_read(store: Store, bundles: Collection[BundleRef]) -> Iterator[None]:
    """Run the block while no other process deletes the files of these bundles (stored folders). A deletion that has
    already begun is not prevented. A bundle that a fork shares is protected in the run that stores it.

    If this process is not allowed to write to the store, a warning is logged that the files may be deleted in the
    meantime.
    """
    with ExitStack() as stack:
        for bundle in bundles:
            try:
                _hold(owner_of(store, f"{bundle.key}/{CONTENTS}"), bundle, stack)
            except StoreFailed as error:
                logger.warning(
                    "The files %s could not be protected while they are read, so retention may delete them: %s",
                    bundle.key,
                    error,
                )
        yield


def _hold(store: Store, bundle: BundleRef, stack: ExitStack) -> None:
    for _ in range(_ATTEMPTS):  # another process may check the new key at that moment, which locks it briefly
        key = f"{READERS}{bundle.digest[:16]}-{secrets.token_hex(8)}"
        with ExitStack() as attempt:
            attempt.callback(_release, store, key)
            if attempt.enter_context(store.lock(key)) is not None:
                stack.enter_context(attempt.pop_all())
                return
    raise StoreFailed(
        f"store {store.uri}: an object below {READERS!r}, which protects files from deletion while they are read, "
        f"could not be locked in {_ATTEMPTS} attempts. Run the same command again"
    )


def _release(store: Store, key: str) -> None:
    with suppress(StoreFailed):  # a key that stays is later recognized as unlocked
        store.delete(key)


def bundles_in_use(store: Store) -> frozenset[str]:
    """Return the bundles (stored folders) that live processes are reading, as the first 16 digits of their digests."""
    in_use = set[str]()
    for name in store.children(READERS.rstrip("/")):
        state = store.lock_state(f"{READERS}{name}").state
        if state == "held":
            in_use.add(name.partition("-")[0])
        elif state == "left":  # a free key may be one that its reader is about to lock
            store.delete(f"{READERS}{name}")
    return frozenset(in_use)
