"""Garbage collection: deletion of objects that no manifest of a run names, and of whole runs that match the user's
rules.

Killed workers leave garbage: shards without a manifest, bundles that were computed again, and work orders that are no
longer used. The deleting process locks the run and begins a new epoch. After that, no process of an older epoch can
commit a manifest that names a deleted object. If such a manifest is committed just before the new epoch begins, it is
deleted by the process that committed it, or by this module.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from rheostat.infra.errors import Damaged
from rheostat.infra.store.bundles import CONTENTS
from rheostat.infra.store.chain import complete_manifests, linked_parts
from rheostat.infra.store.contracts import Entry
from rheostat.infra.store.dependencies import recorded_config
from rheostat.infra.store.forks import is_shared
from rheostat.infra.store.inputs import JobPath, JobText
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.readers import bundles_in_use
from rheostat.infra.store.run_record import RECORD
from rheostat.infra.store.runs import MANIFESTS, Run, list_runs, objects_of_forks, open_run, run_forks
from rheostat.infra.store.storage import is_bucket_address, open_store
from rheostat.infra.store.tombstones import WHOLE_RUN, Deleted, find_tombstone, needed_objects, write_tombstone

MAX_PARALLEL = 8
"""Number of objects that are deleted in parallel."""
TAGS = "tags/"
"""Prefix of the keys of journal entries (stored measurements and decisions) that contain the tags of a run."""
_LOOSE = re.compile(r"(orders|quarantine|shards)/.+")
_FILES_OF_RUNS = re.compile(
    r"(chain|export|forks|journal|lease|lock|manifests|report|shards|[a-z_]+/[0-9a-f]{16})(/.*)?"
)
"""Pattern of keys that only runs have, among the folders of a store."""
_BUNDLED = re.compile(r"(([a-z_]+)/[0-9a-f]{16})/.+")


def find_garbage(run: Run, *, whole_run: bool = False) -> dict[str, list[Entry]]:
    """Return the objects of a run that no result needs (garbage), by kind such as "shards". With `whole_run`, the
    objects that results need are returned too.

    An object is kept if a manifest names it, or if a fork shares it. The manifest may be committed, or pending
    (computed but not committed yet). Objects of other runs that this run shares are left out. Raises Damaged if a
    manifest cannot be read or a record is missing, because needed objects would then look like garbage.
    """
    entries = run.store.entries("")  # listed before the manifests are read: newer objects are not garbage
    manifests = complete_manifests(run)
    objects = needed_objects([] if whole_run else [*manifests, *run.leftover_manifests()])
    shards = {shard.key for shard in objects.shards}
    bundles, in_use = {bundle.key for bundle in objects.bundles}, bundles_in_use(run.store)
    shared = objects_of_forks(run)
    garbage: dict[str, list[Entry]] = {}
    for entry in entries:
        if loose := _LOOSE.fullmatch(entry.key):
            kind, is_kept = loose[1], entry.key in shards
        elif bundled := _BUNDLED.fullmatch(entry.key):
            kind = bundled[2]
            is_kept = bundled[1] in bundles or bundled[1].rpartition("/")[2] in in_use
        else:
            continue
        if not (is_kept or entry.key in shared or is_shared(run.store, entry.key)):
            garbage.setdefault(kind, []).append(entry)
    return garbage


def collect_garbage(run: Run) -> dict[str, list[Entry]]:
    """Delete the objects of a locked run that no result needs, and return them by kind. If this is interrupted, a
    second call deletes the rest.

    Raises Damaged and deletes nothing if a record of the run is missing or unreadable.
    """
    known = {entry.key for entry in run.store.entries(MANIFESTS)}
    garbage = find_garbage(run)
    keys = [entry.key for some in garbage.values() for entry in some]
    tables = [key for key in keys if key.endswith(f"/{CONTENTS}")]
    delete_all(run, tables)  # a bundle without its bundle.json does not exist, so delete that first
    delete_all(run, [key for key in keys if not key.endswith(f"/{CONTENTS}")])
    _delete_late_manifests(run, known, gone={*keys})
    return garbage


def delete_all(run: Run, keys: Sequence[str]) -> None:
    """Delete objects of a locked run in parallel. Raises Fenced and stops as soon as another process may have locked
    the run."""

    def delete(key: str) -> None:
        run.check_lock()
        run.store.delete(key)

    run.check_lease()
    with ThreadPoolExecutor(MAX_PARALLEL) as threads:
        for _ in threads.map(delete, keys):
            pass


def _delete_late_manifests(run: Run, known: Collection[str], *, gone: set[str]) -> None:
    """Delete manifests (records of results) that refer to deleted objects. Another process may have committed such
    manifests in the meantime. `known` are the keys of earlier manifests, and `gone` the keys of deleted objects."""
    for entry in run.store.entries(MANIFESTS):
        if entry.key not in known:
            manifest = run.load(entry.key.removeprefix(MANIFESTS).removesuffix(".json"))
            if not gone.isdisjoint(_parts(manifest)):
                run.check_lock()
                run.store.delete(entry.key)


def _parts(manifest: Manifest) -> Iterator[str]:
    yield from (shard.key for shard in manifest.shards)
    yield from (f"{bundle.key}/{CONTENTS}" for bundle in manifest.bundles.values())


def delete_run(run: Run, *, why: str) -> dict[str, list[Entry]]:
    """Delete the shards, policies and optimizer states of a locked run, and return the deleted objects by kind. The
    run's record, manifests (records of results) and reports are kept.

    Raises Damaged and deletes nothing if a record of the run is missing or unreadable.
    """
    complete_manifests(run)
    write_tombstone(run, WHOLE_RUN, Deleted(why=why, shards_below=("",), bundles_below=("",)))
    return collect_garbage(run)


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of `rheostat gc` that select whole runs for deletion. A run is selected only if every rule allows it. If
    neither an age nor a number is set, no run is selected."""

    older_than: timedelta | None = None
    """Minimum age of a selected run's last commit, by the clock of the store."""
    keep: int | None = None
    """Number of the newest runs, which are never selected."""
    tags: frozenset[str] = frozenset()
    """Tags that protect a run. A run with one of these tags is never selected."""

    @property
    def is_empty(self) -> bool:
        """Whether neither `older_than` nor `keep` is set, so that no run is selected."""
        return self.older_than is None and self.keep is None

    def __str__(self) -> str:
        """Return the rules in the form of command-line options."""
        days = [] if self.older_than is None else [f"--older-than {self.older_than.total_seconds() / 86400:g}d"]
        keep = [] if self.keep is None else [f"--keep {self.keep}"]
        return " ".join(["rheostat gc", *days, *keep, *(f"--tag {tag}" for tag in sorted(self.tags))])


def select_runs(store_uri: str, names: Collection[str], rules: Rules) -> dict[str, datetime]:
    """Return the runs among `names` that the rules select for deletion. The result maps the name of each run to the
    time of its last commit.

    A run is not selected if another run of the store still needs it.
    """
    if rules.is_empty:
        return {}
    everything = list(readable_runs(store_uri))
    candidates = [run for run in everything if run.name in names and find_tombstone(run) is None]
    commit_times = {run.name: last_commit(run) for run in candidates}
    runs = sorted(candidates, key=lambda run: commit_times[run.name], reverse=True)
    return {
        run.name: commit_times[run.name]
        for run in runs[rules.keep or 0 :]
        if (rules.older_than is None or run.store.now() - commit_times[run.name] > rules.older_than)
        and not rules.tags & tags_of(run)
        and not run_forks(run)
        and not any(depends_on(other, run) for other in everything)
    }


def readable_runs(store_uri: str) -> Iterator[Run]:
    """Open every run of a store, except runs whose run record is damaged."""
    for name in list_runs(store_uri):
        with suppress(Damaged):
            yield open_run(store_uri, name)


def folders_without_record(store_uri: str, *, reserved: Collection[str]) -> dict[str, list[Entry]]:
    """Return the folders of a store that contain files of a run but no run record, with these files. `reserved` are the
    names of folders that are not runs, such as that of the registries.

    Either the record was lost, or a process wrote to the run after a user had deleted the run. On S3 such a write
    creates the folder again, because S3 has no directories. Nobody can decide this from the files, so they are not
    garbage.
    """
    store = open_store(store_uri)
    names = {*store.children("")} - {*reserved, *list_runs(store_uri)}
    entries = {name: store.entries(f"{name}/") for name in sorted(names) if not store.exists(name)}  # not files
    found = {
        name: [entry for entry in files if _FILES_OF_RUNS.fullmatch(entry.key.removeprefix(f"{name}/"))]
        for name, files in entries.items()
    }
    return {name: files for name, files in found.items() if files}


def last_commit(run: Run) -> datetime:
    """Return the time at which a run last committed a result, by the clock of the store. Deletions, which are recorded
    in the same way as results, do not count."""
    entries = [*run.store.entries(MANIFESTS), *run.store.entries(RECORD)]
    return max(entry.modified for entry in entries if not entry.key.startswith(f"{MANIFESTS}retention/"))


def depends_on(other: Run, run: Run) -> bool:
    """Return whether the run `other` refers to an object of `run` that `other` may not have copied yet."""
    if other.name == run.name or linked_parts(other):  # a run with a finished part has copied all objects that it needs
        return False
    return any(f"{_address(text)}/".startswith(f"{run.store.uri}/") for text in _texts(recorded_config(other)))


def _address(text: str) -> str:
    """Return the URI of the store to which a text (a path or an address) refers."""
    if is_bucket_address(text):
        return text
    return (JobPath.locate(text) if isinstance(text, JobText) else Path(text)).resolve().as_uri()


def _texts(value: object) -> Iterator[str]:
    """Yield all strings in a configuration, at any depth. Each string may be a path."""
    if isinstance(value, str) and "/" in value and value.isprintable():
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def tags_of(run: Run) -> frozenset[str]:
    """Return the current tags of a run."""
    tags = next(reversed(run.journal(TAGS).values()), {}).get("tags", [])
    assert isinstance(tags, list)
    return frozenset(map(str, tags))


def tag_run(run: Run, tags: Collection[str]) -> None:
    """Store the tags of a locked run. Nothing is written if they have not changed."""
    if {*tags} != tags_of(run):
        run.write_entry(f"{TAGS}{len(run.journal(TAGS)) + 1:04d}", {"tags": [*sorted(tags)]})
