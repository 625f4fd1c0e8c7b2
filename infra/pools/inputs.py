"""What works name in a store elsewhere: brought here side by side before a work begins, and ahead of the next one."""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cached_property

from pydantic import BaseModel

from infra.errors import Damaged, RheostatError
from infra.store.bundles import BundleRef, prefetch_bundle
from infra.store.shards import ShardRef, tombstone_key
from infra.store.storage import Store, open_store

logger = logging.getLogger(__name__)

_OF_ONE = re.compile(r"[0-9a-f]{16}\.json")
"""A tombstone of one shard or bundle; others are of whole parts of a run."""


class WorkInputs:
    """Shards and bundles for the works of one worker, whose run is held as long as it lives."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="ahead")

    def bring(self, work: object) -> None:
        """Have the shards that a work names on this machine; whether they are whole is found where they are read."""
        with suppress(Damaged):
            self._store.fetch({shard.key for shard in self._standing(work)})

    def foresee(self, record: object) -> None:
        """Begin to fetch what may be needed next, as far as the cache has room: shards of a work, or some bundles."""
        self._ahead.submit(self._foresee, record)

    def close(self) -> None:
        """Fetch nothing more."""
        self._ahead.shutdown(wait=False, cancel_futures=True)

    def _foresee(self, record: object) -> None:
        try:
            shards = {shard.key: shard.bytes for shard in self._standing(record)}
            self._store.fetch(shards, room=sum(shards.values()))
            for bundle in record if isinstance(record, tuple) else ():
                if isinstance(bundle, BundleRef):
                    prefetch_bundle(self._store, bundle)
        except RheostatError as error:  # whoever needs it asks again
            logger.info("ahead of its use: %s", error)

    def _standing(self, record: object) -> Iterable[ShardRef]:
        """Shards that nobody has deleted on purpose, as far as is known without asking for each."""
        if not all(_OF_ONE.fullmatch(name) for name in self._tombstones):
            return ()
        return (shard for shard in _named(record) if _name(shard) not in self._tombstones)

    @cached_property
    def _tombstones(self) -> frozenset[str]:
        """Of shards, others come only while nobody holds the run."""
        return frozenset(self._store.children("manifests/retention"))


def _name(shard: ShardRef) -> str:
    return f"{tombstone_key(shard.digest).rpartition('/')[2]}.json"


def _named(record: object) -> Iterator[ShardRef]:
    """Go through the shards that a record names, each once for each place where it stands."""
    if isinstance(record, ShardRef):
        yield record
        return
    parts: Iterable[object] = ()
    if isinstance(record, Mapping):
        parts = record.values()
    elif isinstance(record, list | tuple):
        parts = record
    elif isinstance(record, BaseModel):
        parts = (value for _, value in record)
    elif is_dataclass(record):
        parts = (getattr(record, field.name) for field in fields(record))
    for part in parts:
        yield from _named(part)


def inputs_of(options: Mapping[str, object]) -> WorkInputs | None:
    """Prepare for a worker with these options; none where its store's files are here, or where it has no store."""
    if not {"store_uri", "run"} <= options.keys():
        return None
    store = open_store(f"{options['store_uri']}/{options['run']}")
    return WorkInputs(store) if store.is_remote else None
