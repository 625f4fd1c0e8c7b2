"""Giving disk space back: old bundles by decision, objects that no manifest names by age."""

import re

from infra.errors import BadInput
from infra.store.bundles import BundleRef, delete_bundle, retirement_key
from infra.store.manifests import Manifest
from infra.store.runs import Run
from infra.store.storage import Entry

_SHARD = re.compile(r"shards/[0-9a-f]{64}\.arrow")
_BUNDLED = re.compile(r"(.+/[0-9a-f]{16})/.+")


def retire_bundle(run: Run, ref: BundleRef) -> None:
    """Delete a bundle's files for good, after a manifest that says so; doing it again finishes what was cut short."""
    run.commit(Manifest(key=retirement_key(ref), detail={"bundle": ref.key}))
    delete_bundle(run.store, ref)


def collect_garbage(run: Run, min_age_seconds: float = 86400, dry_run: bool = True) -> list[Entry]:
    """Return, and unless it is a dry run delete, the shards and bundle files that no manifest names.

    The age is by the store's own time and must exceed the longest attempt (24 hours by default): a result that
    is written but not yet committed looks like garbage. Deleting needs a held run, so that no controller of
    another epoch can commit meanwhile.
    """
    if not dry_run and not run.epoch:
        raise BadInput(f"run {run.name!r} is open for reading: hold() it before garbage is deleted")
    garbage = _garbage(run, min_age_seconds)
    if dry_run:
        return garbage
    # A writer that found its result already stored has made it young again: look once more before each is gone.
    still = {entry.key for entry in _garbage(run, min_age_seconds)}
    deleted = [entry for entry in garbage if entry.key in still]
    for entry in deleted:
        run.store.delete(entry.key)
    return deleted


def _garbage(run: Run, min_age_seconds: float) -> list[Entry]:
    # Objects are listed before manifests are read: what is committed in between is seen to be in use.
    born_before = run.store.clock() - min_age_seconds
    old = [entry for entry in run.store.entries("") if entry.modified < born_before]
    manifests = run.manifests()
    keys = {manifest.key for manifest in manifests}
    shards = {shard.key for manifest in manifests for shard in manifest.shards}
    bundles = {
        ref.key for manifest in manifests for ref in manifest.bundles.values() if retirement_key(ref) not in keys
    }
    return [entry for entry in old if _is_garbage(entry.key, shards, bundles)]


def _is_garbage(key: str, shards: set[str], bundles: set[str]) -> bool:
    if _SHARD.fullmatch(key):
        return key not in shards
    bundled = _BUNDLED.fullmatch(key)
    return bundled is not None and not _inside(key, bundles)


def _inside(key: str, bundles: set[str]) -> bool:
    return any(key.startswith(f"{bundle}/") for bundle in bundles)
