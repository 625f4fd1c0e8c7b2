"""What a store need not keep: objects that nothing in a run names, and whole runs that rules give up.

Garbage is what killed workers left: shards without a manifest, bundles of versions that were made again, orders that
nobody carries out. Who deletes holds the run, under an epoch of its own: no commit of an older one can name what is
being deleted, and what was committed a moment too late is taken back by whoever did, or here.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from infra.errors import Damaged
from infra.store.bundles import CONTENTS
from infra.store.chain import complete_manifests, linked_parts
from infra.store.dependencies import recorded_config
from infra.store.inputs import JobPath, JobText
from infra.store.manifests import Manifest
from infra.store.readers import bundles_in_use
from infra.store.run_record import RECORD
from infra.store.runs import MANIFESTS, Run, list_runs, open_run
from infra.store.storage import Entry
from infra.store.tombstones import WHOLE_RUN, Deleted, bury, find_tombstone, needed

AT_A_TIME = 8
"""Objects that are deleted together."""
TAGS = "tags/"
"""Where the journal has a run's tags."""
_LOOSE = re.compile(r"(orders|quarantine|shards)/.+")
_BUNDLED = re.compile(r"(([a-z_]+)/[0-9a-f]{16})/.+")


def find_garbage(run: Run, *, given_up: bool = False) -> dict[str, list[Entry]]:
    """Return by kind the objects of a run that no manifest names, committed or expected, or all objects if given up.

    Raises Damaged if a manifest cannot be read, or if a record is missing that others name: what a missing manifest
    named would be taken for garbage.
    """
    found = run.store.entries("")  # before the manifests: what is committed meanwhile is named
    manifests = complete_manifests(run)
    there = needed([] if given_up else [*manifests, *run.left()])
    shards = {shard.key for shard in there.shards}
    bundles, in_use = {bundle.key for bundle in there.bundles}, bundles_in_use(run.store)
    garbage: dict[str, list[Entry]] = {}
    for entry in found:
        if loose := _LOOSE.fullmatch(entry.key):
            kind, is_kept = loose[1], entry.key in shards
        elif bundled := _BUNDLED.fullmatch(entry.key):
            kind = bundled[2]
            is_kept = bundled[1] in bundles or bundled[1].rpartition("/")[2] in in_use
        else:
            continue
        if not is_kept:
            garbage.setdefault(kind, []).append(entry)
    return garbage


def collect_garbage(run: Run) -> dict[str, list[Entry]]:
    """Delete the garbage of a held run and return it. A second call deletes what an interrupted one left.

    Raises Damaged, with nothing deleted, if a record of the run is missing or unreadable.
    """
    known = {entry.key for entry in run.store.entries(MANIFESTS)}
    garbage = find_garbage(run)
    keys = [entry.key for some in garbage.values() for entry in some]
    tables = [key for key in keys if key.endswith(f"/{CONTENTS}")]
    delete_all(run, tables)  # a bundle ends to exist before its files are gone
    delete_all(run, [key for key in keys if not key.endswith(f"/{CONTENTS}")])
    _take_back(run, known, gone={*keys})
    return garbage


def delete_all(run: Run, keys: Sequence[str]) -> None:
    """Delete objects of a held run, several at a time; Fenced as soon as another process may hold it."""

    def delete(key: str) -> None:
        run.check_held()
        run.store.delete(key)

    run.check_lease()
    with ThreadPoolExecutor(AT_A_TIME) as threads:
        for _ in threads.map(delete, keys):
            pass


def _take_back(run: Run, known: Collection[str], *, gone: set[str]) -> None:
    """Delete manifests that came after all were read, from a process that was fenced, and name what is gone."""
    for entry in run.store.entries(MANIFESTS):
        if entry.key not in known:
            made = run.load(entry.key.removeprefix(MANIFESTS).removesuffix(".json"))
            if not gone.isdisjoint(_parts(made)):
                run.check_held()
                run.store.delete(entry.key)


def _parts(manifest: Manifest) -> Iterator[str]:
    yield from (shard.key for shard in manifest.shards)
    yield from (f"{bundle.key}/{CONTENTS}" for bundle in manifest.bundles.values())


def delete_run(run: Run, *, why: str) -> dict[str, list[Entry]]:
    """Delete the shards, policies and optimizer states of a held run. Its record, manifests and reports stay.

    Raises Damaged, with nothing deleted, if a record of the run is missing or unreadable.
    """
    complete_manifests(run)
    bury(run, WHOLE_RUN, Deleted(why=why, shards_below=("",), bundles_below=("",)))
    return collect_garbage(run)


@dataclass(frozen=True, slots=True)
class Rules:
    """Which runs are given up: those that every rule here gives up; without rules none."""

    older_than: timedelta | None = None
    """Since their last commit, by the store's clock."""
    keep: int | None = None
    """The newest so many are kept."""
    tags: frozenset[str] = frozenset()
    """Runs that carry one of them are kept."""

    @property
    def is_empty(self) -> bool:
        """Whether no run is given up."""
        return self.older_than is None and self.keep is None

    def __str__(self) -> str:
        """The rules as they were given."""
        days = [] if self.older_than is None else [f"--older-than {self.older_than.total_seconds() / 86400:g}d"]
        keep = [] if self.keep is None else [f"--keep {self.keep}"]
        return " ".join(["rheostat gc", *days, *keep, *(f"--tag {tag}" for tag in sorted(self.tags))])


def given_up(store_uri: str, names: Collection[str], rules: Rules) -> dict[str, datetime]:
    """Those runs that the rules give up, and of which no other run of the store needs anything, with their ends."""
    if rules.is_empty:
        return {}
    everything = list(readable_runs(store_uri))
    asked = [run for run in everything if run.name in names and find_tombstone(run) is None]
    ended = {run.name: last_commit(run) for run in asked}
    runs = sorted(asked, key=lambda run: ended[run.name], reverse=True)
    return {
        run.name: ended[run.name]
        for run in runs[rules.keep or 0 :]
        if (rules.older_than is None or run.store.now() - ended[run.name] > rules.older_than)
        and not rules.tags & tags_of(run)
        and not any(needs(other, run) for other in everything)
    }


def readable_runs(store_uri: str) -> Iterator[Run]:
    """Open every run of a store whose record can be read."""
    for name in list_runs(store_uri):
        with suppress(Damaged):
            yield open_run(store_uri, name)


def last_commit(run: Run) -> datetime:
    """When a run last committed anything, by the store's clock."""
    entries = [*run.store.entries(MANIFESTS), *run.store.entries(RECORD)]
    return max(entry.modified for entry in entries if not entry.key.startswith(f"{MANIFESTS}retention/"))


def needs(other: Run, run: Run) -> bool:
    """Whether another run names something in this one and may not have a copy of its own yet."""
    if other.name == run.name or linked_parts(other):  # what has a finished part has copied everything before
        return False
    return any(f"{_address(text)}/".startswith(f"{run.store.uri}/") for text in _texts(recorded_config(other)))


def _address(text: str) -> str:
    """Spell what may be a path as stores do."""
    if text.startswith("s3://"):
        return text
    return (JobPath.locate(text) if isinstance(text, JobText) else Path(text)).resolve().as_uri()


def _texts(value: object) -> Iterator[str]:
    """Texts in a configuration that may be paths."""
    if isinstance(value, str) and "/" in value and value.isprintable():
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def tags_of(run: Run) -> frozenset[str]:
    """The tags that a run was last given."""
    tags = next(reversed(run.journal(TAGS).values()), {}).get("tags", [])
    assert isinstance(tags, list)
    return frozenset(map(str, tags))


def tag_run(run: Run, tags: Collection[str]) -> None:
    """Note a held run's tags, unless they are those that it has."""
    if {*tags} != tags_of(run):
        run.note(f"{TAGS}{len(run.journal(TAGS)) + 1:04d}", {"tags": [*sorted(tags)]})
