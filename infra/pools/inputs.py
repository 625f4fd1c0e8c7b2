"""Download of the inputs of work units from a remote store. Inputs are downloaded before a work unit begins, or while
the previous work unit runs."""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cached_property

from pydantic import BaseModel

from rheostat.infra.errors import Damaged, RheostatError
from rheostat.infra.store.bundles import BundleRef, prefetch_bundle
from rheostat.infra.store.contracts import Store
from rheostat.infra.store.runs import run_store
from rheostat.infra.store.shards import ShardRef, tombstone_key

logger = logging.getLogger(__name__)

_SINGLE_TOMBSTONE = re.compile(r"[0-9a-f]{16}\.json")
"""Pattern of the file names of tombstones (records of a deletion) for a single shard or bundle. Other tombstones record
the deletion of whole parts of a run."""


class WorkInputs:
    """Downloader of the stored data (shards and bundles) that the work units of one worker refer to. The run must stay
    locked while the worker is alive."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="ahead")

    def download(self, work: object) -> None:
        """Download the shards (table files) that a work unit refers to. Their digests are verified later, when they are
        read."""
        with suppress(Damaged):
            self._store.fetch({shard.key for shard in self._undeleted_shards(work)})

    def prefetch(self, record: object) -> None:
        """Start to download the stored data that a record for the next work unit refers to, if the local cache has
        room."""
        self._ahead.submit(self._prefetch, record)

    def close(self) -> None:
        """Cancel all downloads that have not started."""
        self._ahead.shutdown(wait=False, cancel_futures=True)

    def _prefetch(self, record: object) -> None:
        try:
            shards = {shard.key: shard.bytes for shard in self._undeleted_shards(record)}
            self._store.fetch(shards, room=sum(shards.values()))
            for bundle in record if isinstance(record, tuple) else ():
                if isinstance(bundle, BundleRef):
                    prefetch_bundle(self._store, bundle)
        except RheostatError as error:  # the work unit itself will try again
            logger.info("an input could not be downloaded in advance: %s", error)

    def _undeleted_shards(self, record: object) -> Iterable[ShardRef]:
        """Return the shards that a record refers to and that were not deleted. If whole parts of the run were deleted,
        return no shards, because any of them may be missing."""
        if not all(_SINGLE_TOMBSTONE.fullmatch(name) for name in self._tombstones):
            return ()
        return (shard for shard in _find_shards(record) if _tombstone_name(shard) not in self._tombstones)

    @cached_property
    def _tombstones(self) -> frozenset[str]:
        """Names of the run's tombstones (records of deletions). They are cached, because no process adds tombstones of
        single shards while the run is locked."""
        return frozenset(self._store.children("manifests/retention"))


def _tombstone_name(shard: ShardRef) -> str:
    return f"{tombstone_key(shard.digest).rpartition('/')[2]}.json"


def _find_shards(record: object) -> Iterator[ShardRef]:
    """Yield all shard references inside a record, at any depth. A shard that occurs several times is yielded several
    times."""
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
        yield from _find_shards(part)


def open_inputs(options: Mapping[str, object]) -> WorkInputs | None:
    """Return the downloader for a worker that is created with these options. Return None if the options contain no
    store or a local store, because nothing needs to be downloaded."""
    if not {"store_uri", "run"} <= options.keys():
        return None
    store = run_store(str(options["store_uri"]), str(options["run"]))
    return WorkInputs(store) if store.traits.downloads else None
