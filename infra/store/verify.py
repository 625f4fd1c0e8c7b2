"""Verification that all data and records of a run or registry exist and have not changed."""

from collections.abc import Callable, Collection, Iterator

from pydantic import JsonValue

from rheostat.infra.errors import BadInput, Damaged
from rheostat.infra.store.bundles import BundleRef, has_bundle, verify_bundle
from rheostat.infra.store.chain import check_chain
from rheostat.infra.store.checksums import unseal
from rheostat.infra.store.contracts import Objects, Store
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.registry import RETRAINS, Registry, champion_of
from rheostat.infra.store.run_record import RECORD, RunRecord
from rheostat.infra.store.runs import Run, records
from rheostat.infra.store.shards import ShardRef, verify_shard
from rheostat.infra.store.tombstones import needed_objects, replaced_shards


def verify_store(run: Run, *, deferred: Callable[[list[Manifest]], Collection[BundleRef]] = lambda _: ()) -> list[str]:
    """Verify all stored data and records of a run. Return one line per problem, or an empty list. Every byte is read
    again, even if this process has verified it before.

    Objects whose deletion is recorded by a tombstone are not a problem. `deferred` returns the bundles that may not
    have been written yet.
    """
    manifests: list[Manifest] = []
    problems = [*_check_records(run.store), *_check_manifests(run, manifests)]
    problems = problems or [*check_chain(run), *_check_leases(run, manifests)]
    objects = needed_objects(manifests)
    pending = {bundle for bundle in deferred(manifests) if not has_bundle(run.store, bundle)}
    problems += [
        f"shard {key!r} in {run.store.uri}: the prompts were forgotten, but the shard still exists; run `rheostat "
        "forget` again"
        for key in replaced_shards(manifests)
        if run.store.exists(key)
    ]
    return [*problems, *_check_shards(run.store, objects.shards), *_check_bundles(run.store, objects.bundles - pending)]


def verify_registry(registry: Registry) -> list[str]:
    """Verify all records and stored policies of a registry. Return one line per problem, or an empty list.

    Policies that were deleted because of `promotion.keep` are not a problem, but the champion's policy must exist.
    """
    store, problems, drafts = registry.store, list[str](), dict[str, JsonValue]()
    for key in records(store, f"{RETRAINS}/"):
        try:
            drafts[key] = unseal(store.read(key), where=f"{key!r} in {store.uri}").get("champion", 0)
        except (Damaged, BadInput) as error:
            problems.append(str(error))
    try:
        registry_records = registry.records()
    except (Damaged, BadInput) as error:
        return [*problems, str(error)]
    problems += registry.numbered.check_chain()
    problems += [
        f"registry {registry.name!r}: {key!r} began with the champion of record {number}, but this record is missing"
        for key, number in drafts.items()
        if isinstance(number, int) and number > len(registry_records)
    ]
    for at, record in enumerate(registry_records):
        champion = champion_of(registry_records[:at])
        if record.is_champion and record.previous != (0 if champion is None else champion.number):
            problems.append(
                f"registry {registry.name!r}: record {record.number} names record {record.previous} as the champion "
                f"before it, but this was record {0 if champion is None else champion.number}"
            )
    champion = champion_of(registry_records)
    bundles = {
        record.bundle for record in registry_records if record.bundle is not None and has_bundle(store, record.bundle)
    }
    if champion is not None and champion.bundle is not None:
        bundles.add(champion.bundle)
    return [*problems, *_check_bundles(store, bundles)]


def stray_files(run: Run) -> list[str]:
    """Return the names of files in the directory of a run that do not belong to it, such as `.DS_Store`, `.nfs…` or
    editor backups.

    Nothing reads these files. An extra file in a bundle is not included, because it could be loaded and counts as
    damage.
    """
    folders = ("chain/", "journal/", "lease/", "manifests/")
    others = (entry.key for folder in folders for entry in run.store.entries(folder))
    return sorted([*run.store.strays(), *(key for key in others if not key.endswith(".json"))])


def _check_records(store: Objects) -> Iterator[str]:
    for key in (RECORD, *records(store, "lease/"), *records(store, "journal/")):
        decode = RunRecord.unseal if key == RECORD else unseal
        try:
            decode(store.read(key), where=f"{key!r} in {store.uri}")
        except (Damaged, BadInput) as error:
            yield str(error)


def _check_leases(run: Run, manifests: list[Manifest]) -> Iterator[str]:
    """Yield one line for each missing record of an epoch (a period in which one process had locked the run). Without
    the record, the number of the epoch could be used a second time. Results of the run from which this run was forked
    are left out."""
    leases = set(records(run.store, "lease/"))
    own = [each for each in manifests if not run.inherits(each.key)]
    for epoch in range(1, max((manifest.provenance.epoch for manifest in own), default=0) + 1):
        if (key := f"lease/{epoch:06d}.json") not in leases:
            yield f"{key!r} in {run.store.uri} is missing"


def _check_manifests(run: Run, found: list[Manifest]) -> Iterator[str]:
    for path in records(run.store, "manifests/"):
        key = path.removeprefix("manifests/").removesuffix(".json")
        try:
            found.append(run.load(key))
        except (Damaged, BadInput) as error:
            yield str(error)


def _check_shards(store: Store, shards: Collection[ShardRef]) -> Iterator[str]:
    for shard in sorted(shards, key=lambda ref: ref.key):
        try:
            verify_shard(store, shard)
        except (Damaged, BadInput) as error:
            yield str(error)


def _check_bundles(store: Store, bundles: Collection[BundleRef]) -> Iterator[str]:
    for bundle in sorted(bundles, key=lambda ref: ref.key):
        try:
            verify_bundle(store, bundle)
        except (Damaged, BadInput) as error:
            yield str(error)
