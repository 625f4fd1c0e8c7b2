"""Tombstones: manifests that record which objects were deleted intentionally.

Older manifests that name the deleted objects remain valid. A tombstone has one of these keys:

retention/4b1f… records the deletion of one bundle or shard, by its digest, and may name a replacement shard
retention/it-0003 records the deletion of the shards that only manifests below certain key prefixes name retention/run
records the deletion of all shards and bundles of a run retention/forgotten records that users' prompts were removed
from shards of the run
"""

import getpass
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from rheostat.infra.config import Settings, read_recorded
from rheostat.infra.errors import RunChanged
from rheostat.infra.store.bundles import BundleRef
from rheostat.infra.store.chain import linked_parts
from rheostat.infra.store.manifests import Manifest, provenance_here
from rheostat.infra.store.runs import Run
from rheostat.infra.store.shards import ShardRef, tombstone_key

WHOLE_RUN: Final = "run"
FORGOTTEN: Final = "forgotten"
"""Name of the tombstone that records that users' prompts were removed from the shards of a run."""
_FOLDER: Final = "retention/"


class Deleted(Settings):
    """Content of a tombstone (the record of a deletion): what was deleted, and why."""

    why: str = ""
    """Command or rule that caused the deletion."""
    shards_below: tuple[str, ...] = ()
    """Prefixes of the keys of results whose shards (tables) were deleted. Shards that other results also
    use were kept."""
    bundles_below: tuple[str, ...] = ()
    """Prefixes of the keys of results whose bundles (folders) were deleted. Bundles that other results also use were
    kept."""
    bundle: str = ""
    """Key of the bundle (folder) if only one bundle was deleted, otherwise an empty string."""
    shard: str = ""
    """Key of the shard (table) if only one shard was deleted, otherwise an empty string."""
    rows: int = 0
    """Number of rows whose texts were removed, if the shard was replaced by a shard without these texts."""


class Tombstone(Settings):
    """Deletion in a run, in the form that is shown to users."""

    what: str
    """Deleted data: `run` for the whole run, the name of a part such as `it-0003`, or the key of a bundle or shard."""
    why: str
    """Command or rule that caused the deletion."""
    who: str
    """User and machine that requested the deletion, with the time."""
    when: str
    """UTC time of the deletion, by the clock of the machine that deleted the object."""
    is_bundle: bool
    """Whether a single bundle (a policy or an optimizer state) was deleted."""
    is_replaced: bool
    """Whether a single shard was deleted and replaced by another shard, for example to erase users' prompts."""


@dataclass(frozen=True, slots=True)
class NeededObjects:
    """Stored data that a run still needs: the shards (tables) and bundles (folders) to which its results refer."""

    shards: frozenset[ShardRef]
    bundles: frozenset[BundleRef]


def needed_objects(manifests: Iterable[Manifest]) -> NeededObjects:
    """Return the data to which these results refer, except data that was deleted on purpose, as recorded by a
    tombstone."""
    manifests = list(manifests)
    deletions = [(each.key, _read(each)) for each in manifests if each.key.startswith(_FOLDER)]
    tombstone_keys = {key for key, _ in deletions}
    without_shards = tuple(prefix for _, deleted in deletions for prefix in deleted.shards_below)
    without_bundles = tuple(prefix for _, deleted in deletions for prefix in deleted.bundles_below)
    shards = {shard for each in manifests if not each.key.startswith(without_shards) for shard in each.shards}
    bundles = {
        bundle for each in manifests if not each.key.startswith(without_bundles) for bundle in each.bundles.values()
    }
    return NeededObjects(
        frozenset(shard for shard in shards if tombstone_key(shard.digest) not in tombstone_keys),
        frozenset(bundle for bundle in bundles if tombstone_key(bundle.digest) not in tombstone_keys),
    )


def is_replacement(manifest: Manifest) -> bool:
    """Return whether a manifest is the tombstone of a shard that was deleted and replaced by another shard."""
    return manifest.key.startswith(_FOLDER) and bool(manifest.shards)


def replaced_shards(manifests: Iterable[Manifest]) -> list[str]:
    """Return the keys of deleted shards that were replaced by other shards."""
    return [_read(each).shard for each in manifests if is_replacement(each)]


def write_tombstone(run: Run, name: str, deleted: Deleted, *, replacement: tuple[ShardRef, ...] = ()) -> Manifest:
    """Record a deletion in a locked run, before the objects are deleted, and return the record (tombstone). `name`
    identifies what is deleted. If the deletion is already recorded, the existing record is returned."""
    existing = run.find(f"{_FOLDER}{name}")
    if existing is not None:
        return existing
    detail = deleted.model_dump(mode="json", exclude_defaults=True)
    tombstone = Manifest(
        key=f"{_FOLDER}{name}", shards=replacement, detail=detail, provenance=provenance_here(worker=_user())
    )
    return run.commit(tombstone)


def find_tombstone(run: Run, part: str = WHOLE_RUN) -> Tombstone | None:
    """Return the record of the deletion of a part of a run, or of the whole run, which is the default. Return None if
    it was not deleted."""
    manifest = run.find(f"{_FOLDER}{WHOLE_RUN}") or run.find(f"{_FOLDER}{part}")
    return None if manifest is None else _describe(manifest)


def deleted_parts(run: Run) -> frozenset[str]:
    """Return the names of everything that was deleted from a run: parts such as `it-0003`, `run` for the whole run, or
    digests of single objects. This takes one request to the store."""
    return frozenset(name.removesuffix(".json") for name in run.folders(_FOLDER))


def tombstones(run: Run) -> Iterator[Tombstone]:
    """Yield the records of all deletions from a run."""
    return map(_describe, run.manifests(_FOLDER))


def check_not_deleted(run: Run) -> None:
    """Raise RunChanged if a run cannot continue because its rollouts, samples and policies were deleted."""
    stone = find_tombstone(run)
    if stone is not None:
        raise RunChanged(
            f"run {run.name!r} in {run.store.uri}: the rollouts, samples and policies were deleted by {stone.why} "
            f"({stone.who}), so the run cannot continue. Another name starts from the beginning."
        )


def check_remembers(run: Run, last: str) -> None:
    """Raise RunChanged if `rheostat forget` has removed prompts from a run that is not finished. Such a run must not be
    trained further. `last` is the name of the last part of a finished run."""
    if FORGOTTEN in deleted_parts(run) and last not in linked_parts(run):
        raise RunChanged(
            f"run {run.name!r} in {run.store.uri}: `rheostat forget` removed prompts from the run, so it is not "
            "trained further. Choose another name, and data without these prompts."
        )


def _describe(manifest: Manifest) -> Tombstone:
    deleted, provenance = _read(manifest), manifest.provenance
    return Tombstone(
        what=deleted.shard or deleted.bundle or manifest.key.removeprefix(_FOLDER),
        why=deleted.why or "[retention]",
        when=provenance.created,
        who=f"{provenance.worker} on {provenance.host}, {provenance.created}",
        is_bundle=bool(deleted.bundle),
        is_replaced=bool(manifest.shards),
    )


def _read(manifest: Manifest) -> Deleted:
    return read_recorded(Deleted, manifest.detail)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the user account has no name
        return "nobody"
