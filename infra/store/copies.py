"""Copying of runs to other stores. If a copy is interrupted, calling the same function again continues the copy."""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

from rheostat.infra.errors import BadInput, Conflict, Damaged
from rheostat.infra.store.bundles import CONTENTS
from rheostat.infra.store.chain import complete_manifests
from rheostat.infra.store.contracts import Entry, Store
from rheostat.infra.store.epochs import LEASES
from rheostat.infra.store.forks import FORK, FORKS
from rheostat.infra.store.run_record import RECORD
from rheostat.infra.store.runs import JOURNAL, LOCK, MANIFESTS, METRICS, TRANSIENT, Run, open_run, run_store
from rheostat.infra.store.tombstones import needed_objects

logger = logging.getLogger(__name__)

MAX_PARALLEL = 8
"""Number of objects that are copied in parallel."""
REPORT_SECONDS = 5.0
"""Interval in seconds between two progress messages while a run is copied."""
RECORDS = (LEASES, JOURNAL, MANIFESTS, "chain/", RECORD)
"""Prefixes of the records of a run, in the order in which they are copied, after all other objects. The run record is
last, because a run exists as soon as it has a run record."""


@dataclass(frozen=True, slots=True)
class RunCopy:
    """Result of copying a run to another store."""

    run: Run
    """Copy of the run in the target store, opened for reading."""
    objects: int
    bytes: int
    found: int
    """Number of objects that existed in the target store before and were not copied."""


def copy_run(name: str, source_uri: str, target_uri: str) -> RunCopy:
    """Copy a run to another store under the same name, and return the copy. Objects that already exist in the target
    store are not copied again.

    Both runs are locked during the copy, and nothing is overwritten. Calling this again continues an interrupted copy,
    or adds newer results. The run does not exist in the target until the first copy is complete. The copy of a fork
    contains all objects that the fork shares with other runs.

    Raises RunLocked if another live process has locked the source. Raises BadInput if the target is the same store, is
    locked, or has a different run with this name. Raises Conflict if the target has a different object under a key.
    Raises Damaged, with nothing copied, if objects or records of the source are missing.
    """
    run, target = open_run(source_uri, name), run_store(target_uri, name)
    if run.store.uri == target.uri:
        raise BadInput(
            f"run {name!r} cannot be copied from {source_uri}, because it is already in {target_uri}. Choose another "
            "store for the copy."
        )
    target.check()
    if target.exists(RECORD) and target.read(RECORD) != run.store.read(RECORD):
        raise BadInput(
            f"run {name!r} cannot be copied, because {target_uri} contains a different run with this name. Choose "
            "another store."
        )
    with run.lock_without_epoch(), target.lock(LOCK) as lease:
        if lease is None:
            raise BadInput(
                f"run {name!r} cannot be copied: its copy in {target_uri} is locked by another process. Wait until "
                "that process ends, then run the same command again."
            )
        excluded = (*TRANSIENT, METRICS, FORKS, FORK)
        entries = [entry for entry in run.store.entries("") if not entry.key.startswith(excluded)]
        _check_listed(run, entries)
        sizes = {entry.key: entry.bytes for entry in target.entries("")}
        existing = [entry for entry in entries if entry.key in sizes]
        copier = _Copier(run.store, target)
        copier.compare(existing, sizes)
        if run.fork is not None:
            target.put(FORK, run.fork.build_copy_record().seal())
        copier.copy([entry for entry in entries if entry.key not in sizes])
    return RunCopy(open_run(target_uri, name), len(entries), sum(entry.bytes for entry in entries), len(existing))


def _check_listed(run: Run, entries: Sequence[Entry]) -> None:
    """Raise Damaged if data or records of a run are missing, or if the listing `entries` of the run's store lacks
    existing data."""
    objects, listed = needed_objects(complete_manifests(run)), {entry.key for entry in entries}
    keys = {shard.key for shard in objects.shards} | {f"{bundle.key}/{CONTENTS}" for bundle in objects.bundles}
    absent = sorted(keys - listed)  # an optimizer state that is not written yet may be missing too
    for key, is_there in zip(absent, run.store.exist(absent), strict=True):
        if is_there or key.startswith("shards/"):
            fault = "exists but is not in the listing of the store" if is_there else "is missing"
            raise Damaged(
                f"run {run.name!r}: {key!r} in {run.store.uri} {fault}. Nothing was copied. Restore the file from "
                "another copy of the run first."
            )


def _rank(key: str) -> int:
    """Return the position of an object in the order of copying: 0 for data, or the 1-based index of the prefix in
    `RECORDS` for a record."""
    return next((rank for rank, folder in enumerate(RECORDS, start=1) if key.startswith(folder)), 0)


@dataclass(frozen=True, slots=True)
class _Copier:
    source: Store
    target: Store

    def compare(self, existing: Sequence[Entry], sizes: Mapping[str, int]) -> None:
        """Compare objects that exist in both stores: their sizes, and for records also their bytes. Raises Conflict if
        one differs. `sizes` are the sizes in the target store, by key."""

        def differs(entry: Entry) -> bool:
            key = entry.key
            return sizes[key] != entry.bytes or (_rank(key) > 0 and self.source.read(key) != self.target.read(key))

        with ThreadPoolExecutor(MAX_PARALLEL) as threads:
            for entry, other in zip(existing, threads.map(differs, existing), strict=True):
                if other:
                    raise self._conflict(entry.key)

    def copy(self, entries: Iterable[Entry]) -> None:
        """Copy objects in parallel, records last. After a failure, no further copy starts, but copies in progress are
        finished."""
        pending = sorted(entries, key=lambda entry: _rank(entry.key))
        reported, done, size, total = time.monotonic(), 0, 0, sum(entry.bytes for entry in pending)
        with ThreadPoolExecutor(MAX_PARALLEL) as threads:
            for _, same in groupby(pending, lambda entry: _rank(entry.key)):
                for entry in threads.map(self._copy, same):
                    done, size = done + 1, size + entry.bytes
                    if time.monotonic() - reported > REPORT_SECONDS:
                        reported, of = time.monotonic(), f"{size / 1e6:,.0f} of {total / 1e6:,.0f} MB"
                        logger.info("copied %d of %d objects, %s", done, len(pending), of)

    def _copy(self, entry: Entry) -> Entry:
        if not self.target.put(entry.key, self.source.local_path(entry.key)):
            raise self._conflict(entry.key)
        return entry

    def _conflict(self, key: str) -> Conflict:
        return Conflict(
            f"{key!r} in {self.target.uri} differs from the object in {self.source.uri}, and it was not overwritten. "
            "Copy to another store"
        )
