"""Objects of a run that a fork at an iteration shares."""

import re
from dataclasses import dataclass
from typing import Final

from rheostat.infra.errors import Damaged
from rheostat.infra.store.bundles import CONTENTS, BundleRef, has_bundle
from rheostat.infra.store.dependencies import DEPENDENCIES, dependency_records
from rheostat.infra.store.forks import is_shared
from rheostat.infra.store.runs import JOURNAL, MANIFESTS, Run, objects_of_forks
from rheostat.infra.store.shards import tombstone_key
from rheostat.infra.store.tombstones import deleted_parts, needed_objects
from rheostat.tasks.run.keys import StageKey, evaluation_key, iteration_key

_EXCLUDED: Final = ("rescore/", "recredit/", "retention/")
"""Prefixes of the keys of results that `_is_before` excludes: rescorings, recredits and records of deletions. The
latter are selected separately."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """Stored results of iterations after the beginning of a fork, which a what-if run trains on again."""

    first: int
    """First iteration of which results are shared."""
    last: int
    """Last iteration of which results are shared."""
    stages: frozenset[str]
    """Stages whose results are shared, such as "rollout"."""

    @property
    def iterations(self) -> range:
        """Numbers of the iterations."""
        return range(self.first, self.last + 1)


class StoredBundles:
    """Policies and optimizer states (bundles) of a run that a fork can share.

    A bundle whose deletion is recorded may still exist, because another fork shares it or because the deletion is not
    finished. It counts as stored only if another fork shares it, that is, a fork with another name than `name`.
    """

    def __init__(self, run: Run, name: str) -> None:
        self._run, self._kept = run, objects_of_forks(run, without=name)
        self._deleted = {f"retention/{part}" for part in deleted_parts(run)}

    def has(self, ref: BundleRef) -> bool:
        """Return whether a bundle is stored and will not be deleted."""
        contents = f"{ref.key}/{CONTENTS}"
        is_kept = contents in self._kept or is_shared(self._run.store, contents)
        return (is_kept or tombstone_key(ref.digest) not in self._deleted) and has_bundle(self._run.store, ref)


def find_shared(
    run: Run, number: int, *, name: str, replayed: Replayed | None = None
) -> tuple[dict[str, list[str]], int]:
    """Return the keys of the objects that the fork `name` at iteration `number` shares, by name of the run that stores
    them, and their total size in bytes. `replayed` are results of later iterations that are shared as well. Raises
    Damaged if an object is missing."""
    manifests, stored = run.manifests(), StoredBundles(run, name)
    results = [each for each in manifests if _is_before(run, each.key, number) or _is_replayed(each.key, replayed)]
    deletions = [each for each in manifests if each.key.startswith("retention/")]
    named = {bundle for each in results for bundle in each.bundles.values()}
    bundles = {bundle for bundle in named if stored.has(bundle)}
    shards = needed_objects([*results, *deletions]).shards
    tombstones = {tombstone_key(bundle.digest) for bundle in named - bundles}
    tombstones |= {tombstone_key(shard.digest) for each in results for shard in each.shards}
    tombstones |= {f"retention/{iteration_key(each)}" for each in range(1, number + 1)}
    sizes = {entry.key: entry.bytes for entry in run.store.entries("")}
    keys = {f"{MANIFESTS}{each.key}.json" for each in results}
    keys |= {f"{MANIFESTS}{each.key}.json" for each in deletions if each.key in tombstones}
    keys |= {shard.key for shard in shards}
    if absent := sorted(keys - sizes.keys()):
        raise Damaged(f"run {run.name!r}: {absent[0]!r} is missing. Restore it from a copy of the run.")
    folders = {bundle.key for bundle in bundles}
    keys |= {key for key in sizes if "/".join(key.split("/")[:2]) in folders}
    keys |= {key for key in sizes if key.startswith(JOURNAL) and _is_entry_before(run, key, number)}
    owners = {} if run.fork is None else {key: name for name, some in run.fork.shared.items() if name for key in some}
    shared: dict[str, list[str]] = {}
    for key in sorted(keys):
        shared.setdefault(owners.get(key, run.name), []).append(key)
    return shared, sum(sizes[key] for key in keys)


def _is_before(run: Run, key: str, number: int) -> bool:
    """Return whether a fork at iteration `number` shares a result."""
    if key.startswith(_EXCLUDED):
        return False
    if key.startswith("it-"):
        return StageKey.parse(key).iteration <= number
    if key.startswith("eval-"):
        evaluated = StageKey.parse(key).evaluation
        return evaluated <= number and run.has(StageKey.of(evaluation_key(evaluated), "summary"))
    return True


def _is_replayed(key: str, replayed: Replayed | None) -> bool:
    """Return whether a what-if run shares a result of an iteration that it trains on again."""
    if replayed is None or not key.startswith("it-"):
        return False
    parsed = StageKey.parse(key)
    return parsed.iteration in replayed.iterations and parsed.stage in replayed.stages


def _is_entry_before(run: Run, key: str, number: int) -> bool:
    """Return whether a fork at iteration `number` shares a journal entry."""
    name = key.removeprefix(JOURNAL).removesuffix(".json")
    if name.startswith(DEPENDENCIES):
        index = int(name.removeprefix(DEPENDENCIES))
        return index == 1 or dependency_records(run)[index - 1].iteration <= number
    match = re.match(r"placement/(it|eval)-(\d+)/", name)
    return match is not None and int(match[2]) <= number
