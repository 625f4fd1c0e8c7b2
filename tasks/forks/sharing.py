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
"""Prefixes of the keys of results that `Sharing` does not include: rescorings, recredits, and records of deletions,
which `find_shared` selects."""
_GENERATED: Final = ("plan", "rollout")
"""Stages whose results do not depend on rewards."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Choice of the stored results of a run that a fork shares."""

    iteration: int
    """Last iteration with all results shared."""
    rescores: bool = False
    """Whether the fork scores the evaluation after `iteration` again, so that only its completions are shared."""
    last: int = 0
    """Last iteration with shared results of `stages`. A what-if run trains on them again."""
    stages: frozenset[str] = frozenset()
    """Stages whose results are shared after `iteration`, such as "rollout". Empty unless the fork is a what-if run."""
    shards: frozenset[str] = frozenset()
    """Keys of other shared results after `iteration`, each for one rollout shard without excluded prompts."""

    @property
    def replayed(self) -> range:
        """Numbers of the iterations that share only the results of `stages`."""
        return range(self.iteration + 1, self.last + 1)

    def includes(self, run: Run, key: str) -> bool:
        """Return whether a fork of a run shares the result with this key."""
        if key.startswith(_EXCLUDED):
            return False
        if key.startswith("it-"):
            parsed = StageKey.parse(key)
            is_replayed = parsed.iteration in self.replayed and parsed.stage in self.stages
            return parsed.iteration <= self.iteration or is_replayed or key in self.shards
        if key.startswith("eval-"):
            parsed = StageKey.parse(key)
            is_needed = parsed.stage in _GENERATED or not (self.rescores and parsed.evaluation == self.iteration)
            is_complete = run.has(StageKey.of(evaluation_key(parsed.evaluation), "summary"))
            return parsed.evaluation <= self.iteration and is_complete and is_needed
        return True


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


def find_shared(run: Run, sharing: Sharing, *, name: str) -> tuple[dict[str, list[str]], int]:
    """Return the keys of the objects that the fork `name` of a run shares, by name of the run that stores them, and
    their total size in bytes. Raises Damaged if an object is missing."""
    number, manifests, stored = sharing.iteration, run.manifests(), StoredBundles(run, name)
    results = [each for each in manifests if sharing.includes(run, each.key)]
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


def _is_entry_before(run: Run, key: str, number: int) -> bool:
    """Return whether a fork at iteration `number` shares a journal entry."""
    name = key.removeprefix(JOURNAL).removesuffix(".json")
    if name.startswith(DEPENDENCIES):
        index = int(name.removeprefix(DEPENDENCIES))
        return index == 1 or dependency_records(run)[index - 1].iteration <= number
    match = re.match(r"placement/(it|eval)-(\d+)/", name)
    return match is not None and int(match[2]) <= number
