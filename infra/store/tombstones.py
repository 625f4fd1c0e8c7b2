"""Tombstones: manifests that say what was deleted on purpose, so that all that named it still proves what there was.

retention/4b1f…      the bundle, or the shard, of that digest; of a shard, it may name another in its place
retention/it-0003    all shards that manifests below some prefixes name, and no others do
retention/run        all shards and bundles of a run
retention/forgotten  nothing by itself: users' prompts were taken out of shards
"""

import getpass
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from infra.config import Settings, read_recorded
from infra.errors import RunChanged
from infra.store.bundles import BundleRef
from infra.store.chain import linked_parts
from infra.store.manifests import Manifest, provenance_here
from infra.store.runs import Run
from infra.store.shards import ShardRef, tombstone_key

WHOLE_RUN: Final = "run"
FORGOTTEN: Final = "forgotten"
"""Under this a run says that prompts were taken out of it."""
_FOLDER: Final = "retention/"


class Deleted(Settings):
    """What a tombstone says: its manifest's detail."""

    why: str = ""
    """What deleted it."""
    shards_below: tuple[str, ...] = ()
    """Prefixes of manifests whose shards are gone, those aside that others name."""
    bundles_below: tuple[str, ...] = ()
    """The same of bundles."""
    bundle: str = ""
    """Key of the one bundle that is gone."""
    shard: str = ""
    """Key of the one shard that is gone."""
    rows: int = 0
    """Rows that the shard in its place has without their texts."""


class Tombstone(Settings):
    """What was deleted, for people."""

    what: str
    """Such as `run`, `it-0003`, or the key of a bundle or shard."""
    why: str
    """What deleted it."""
    who: str
    """User, machine and time."""
    when: str
    """UTC, by that machine's clock."""
    is_bundle: bool
    """Whether it is a policy's, or an optimizer's."""
    is_replaced: bool
    """Whether another shard stands in its place."""


@dataclass(frozen=True, slots=True)
class Needed:
    """What must be there."""

    shards: frozenset[ShardRef]
    bundles: frozenset[BundleRef]


def needed(manifests: Iterable[Manifest]) -> Needed:
    """Everything that manifests name, but for what the tombstones among them say is gone."""
    manifests = list(manifests)
    said = [(each.key, _read(each)) for each in manifests if each.key.startswith(_FOLDER)]
    gone = {key for key, _ in said}
    without_shards = tuple(prefix for _, deleted in said for prefix in deleted.shards_below)
    without_bundles = tuple(prefix for _, deleted in said for prefix in deleted.bundles_below)
    shards = {shard for each in manifests if not each.key.startswith(without_shards) for shard in each.shards}
    bundles = {
        bundle for each in manifests if not each.key.startswith(without_bundles) for bundle in each.bundles.values()
    }
    return Needed(
        frozenset(shard for shard in shards if tombstone_key(shard.digest) not in gone),
        frozenset(bundle for bundle in bundles if tombstone_key(bundle.digest) not in gone),
    )


def is_replacement(manifest: Manifest) -> bool:
    """Whether it is a tombstone that has a shard stand in the place of another."""
    return manifest.key.startswith(_FOLDER) and bool(manifest.shards)


def replaced(manifests: Iterable[Manifest]) -> list[str]:
    """Keys of the shards that others stand in place of."""
    return [_read(each).shard for each in manifests if is_replacement(each)]


def bury(run: Run, name: str, deleted: Deleted, *, instead: tuple[ShardRef, ...] = ()) -> Manifest:
    """Commit a tombstone to a held run before what it speaks of is deleted; the one that is there already stands."""
    known = run.find(f"{_FOLDER}{name}")
    if known is not None:
        return known
    detail = deleted.model_dump(mode="json", exclude_defaults=True)
    made = Manifest(key=f"{_FOLDER}{name}", shards=instead, detail=detail, provenance=provenance_here(worker=_user()))
    return run.commit(made)


def find_tombstone(run: Run, part: str = WHOLE_RUN) -> Tombstone | None:
    """What was said when the shards of a part, or of the whole run, were deleted."""
    manifest = run.find(f"{_FOLDER}{WHOLE_RUN}") or run.find(f"{_FOLDER}{part}")
    return None if manifest is None else _told(manifest)


def deleted_parts(run: Run) -> frozenset[str]:
    """Parts whose shards were deleted, be it the whole run; one look at the store."""
    return frozenset(name.removesuffix(".json") for name in run.folders(_FOLDER))


def tombstones(run: Run) -> Iterator[Tombstone]:
    """Every one of a run."""
    return map(_told, run.manifests(_FOLDER))


def check_not_deleted(run: Run) -> None:
    """Raise RunChanged if the run can make nothing more, since what it began with was deleted."""
    stone = find_tombstone(run)
    if stone is not None:
        raise RunChanged(
            f"run {run.name!r} in {run.store.uri}: its rollouts, samples and policies were deleted by {stone.why} "
            f"({stone.who}); another name begins anew"
        )


def check_remembers(run: Run, last: str) -> None:
    """Raise RunChanged if a run that has forgotten what it learns from is to go on until it has a part."""
    if FORGOTTEN in deleted_parts(run) and last not in linked_parts(run):
        raise RunChanged(
            f"run {run.name!r} in {run.store.uri}: `rheostat forget` took prompts out of it, so it learns no further; "
            "another name begins anew, from data without them"
        )


def _told(manifest: Manifest) -> Tombstone:
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
    except (KeyError, OSError):  # an account without a name
        return "nobody"
