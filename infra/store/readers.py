"""Bundles that other processes read while the run continues. Retention and garbage collection leave their files.

A reader holds a name below `readers/` for as long as it reads, at most for its life. It looks for a tombstone after it
holds the name, and whoever deletes looks for readers after the tombstone is committed: one of the two sees the other.
"""

import logging
import secrets
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

from infra.errors import StoreFailed
from infra.store.bundles import BundleRef
from infra.store.storage import Store

READERS: Final = "readers/"
"""Prefix of the names that readers hold: 16 digits of the bundle's digest, a dash and a random number."""
_ATTEMPTS: Final = 5

logger = logging.getLogger(__name__)


@contextmanager
def keep_while_read(store: Store, bundles: Collection[BundleRef]) -> Iterator[None]:
    """Run the block while nobody deletes the files of these bundles, except those that had a tombstone before.

    If this process may not write to the store, a warning says that the files may be deleted meanwhile.
    """
    with ExitStack() as stack:
        for bundle in bundles:
            try:
                _hold(store, bundle, stack)
            except StoreFailed as error:
                logger.warning("retention may delete %s while it is read: %s", bundle.key, error)
        yield


def _hold(store: Store, bundle: BundleRef, stack: ExitStack) -> None:
    for _ in range(_ATTEMPTS):  # a look at the new name may come first, for a moment
        key = f"{READERS}{bundle.digest[:16]}-{secrets.token_hex(8)}"
        with ExitStack() as attempt:
            attempt.callback(_release, store, key)
            if attempt.enter_context(store.hold(key)) is not None:
                stack.enter_context(attempt.pop_all())
                return
    raise StoreFailed(f"store {store.uri}: cannot hold a name below {READERS!r}")


def _release(store: Store, key: str) -> None:
    with suppress(StoreFailed):  # a name that stays is found not to be held
        store.delete(key)


def bundles_in_use(store: Store) -> frozenset[str]:
    """Return the first 16 digits of the digests of bundles that live processes read; names of dead ones are deleted."""
    in_use = set[str]()
    for name in store.children(READERS.rstrip("/")):
        state = store.look_at(f"{READERS}{name}").state
        if state == "held":
            in_use.add(name.partition("-")[0])
        elif state == "left":  # a free name may be one that its reader is about to hold
            store.delete(f"{READERS}{name}")
    return frozenset(in_use)
