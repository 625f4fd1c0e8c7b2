"""Removal of users' prompts and their completions from a run. Lineage, rewards and lengths are kept.

A shard with such data is written again without it, a tombstone names the new shard that replaces it, and the old shard
is deleted. Readers follow the tombstone, and every manifest stays unchanged.
"""

from collections.abc import Mapping, Sequence

import pyarrow.parquet as pq

from rheostat.infra.config import Settings
from rheostat.infra.store.chain import complete_manifests
from rheostat.infra.store.dependencies import dependency_records
from rheostat.infra.store.garbage import collect_garbage, delete_all
from rheostat.infra.store.runs import Run, open_run, run_forks
from rheostat.infra.store.shards import ShardRef, current_shard, read_shard, rewrite_shard
from rheostat.infra.store.tombstones import (
    FORGOTTEN,
    Deleted,
    is_replacement,
    needed_objects,
    replaced_shards,
    write_tombstone,
)
from rheostat.models.rollouts.forgotten import Prompts, erase_prompts, find_prompts
from rheostat.tasks.run.keys import PROMPTS, StageKey
from rheostat.tasks.views.export import write_export

WHY = "rheostat forget"


class Forgotten(Settings):
    """Report of `rheostat forget` on one run: how much data was removed, or would be removed with --delete."""

    run: str
    """Name of the run."""
    prompts: int
    """Number of the prompts to forget that occur in the run."""
    shards: int
    """Number of shards that are rewritten."""
    rows: int
    """Number of rows in the rewritten shards whose texts and tokens are erased."""
    exports: int
    """Number of exported files that are rewritten."""
    data: list[str]
    """Users' data files from which the run read its prompts. These files are never changed."""


def with_forks(runs: Sequence[Run]) -> list[Run]:
    """Return the runs and all their forks, in the order in which prompts must be removed from them. A fork is before
    the runs whose shards it shares, because it must write new shards before the shared ones are deleted."""
    found, pending = dict[str, Run](), [*runs]
    while pending:
        run = pending.pop()
        if run.name not in found:
            found[run.name] = run
            pending += [open_run(run.store.uri.rpartition("/")[0], name) for name in run_forks(run)]
    return sorted(found.values(), key=lambda run: (-len(run.fork.shared if run.fork else ()), run.name))


def remove_prompts(run: Run, ids: frozenset[str], *, delete: bool) -> Forgotten:
    """Report the data that a run has of the given prompts. If `delete` is true, also remove it, which requires a locked
    run.

    If a call was interrupted, the next call finishes its work. Raises Damaged before anything is deleted if a record of
    the run is missing, because shards that are named only there could not be found.
    """
    shards = _find_shards(run)
    prompts = {split: _find_prompts(run, key, ids, shards) for split, key in PROMPTS.items()}
    rows = [
        count for ref, split in shards.items() if (count := _rewrite_shard(run, ref, prompts[split], delete=delete))
    ]
    everywhere = Prompts(ids, frozenset())
    exports = [key for key in _list_exports(run) if _rewrite_export(run, key, everywhere, delete=delete)]
    if delete:
        # including deleted shards, because this machine may have cached copies
        delete_all(run, replaced_shards(run.manifests()))
        delete_all(run, [entry.key for entry in run.store.entries("report/") if entry.key.endswith(".html")])
        collect_garbage(run)
    return Forgotten(
        run=run.name,
        prompts=len(frozenset().union(*(listed.ids for listed in prompts.values()))),
        shards=len(rows),
        rows=sum(rows),
        exports=len(exports),
        data=[path for record in dependency_records(run)[-1:] for path in record.dependencies.data],
    )


def _find_shards(run: Run) -> dict[ShardRef, str]:
    """Return all stored shards, each with the split of its prompts: "train" or "heldout". For a shard that was
    rewritten, the new shard is returned."""
    manifests = [each for each in [*complete_manifests(run), *run.leftover_manifests()] if not is_replacement(each)]
    needed_shards = needed_objects(manifests).shards
    return {
        ref: _split_of(StageKey.parse(each.key)) for each in manifests for ref in each.shards if ref in needed_shards
    }


def _split_of(key: StageKey) -> str:
    return "heldout" if key == PROMPTS["heldout"] or key.is_evaluation else "train"


def _find_prompts(run: Run, key: str, ids: frozenset[str], shards: Mapping[ShardRef, str]) -> Prompts:
    """Return which of the prompts with these ids are in a split of the run. `key` is the result that stores the
    split."""
    manifest = run.find(key)
    if manifest is None or manifest.shards[0] not in shards:
        return Prompts(frozenset(), frozenset())
    return find_prompts(read_shard(run.store, manifest.shards[0], ["prompt_id", "images"]), ids)


def _rewrite_shard(run: Run, ref: ShardRef, prompts: Prompts, *, delete: bool) -> int:
    """Erase the prompts and completions from a shard if `delete` is true, and replace the shard by the result. Return
    the number of rows that contain them."""
    if not prompts.ids:
        return 0
    emptied, rows = erase_prompts(read_shard(run.store, ref), prompts)
    if rows and delete:
        old, new = current_shard(run.store, ref), rewrite_shard(run.store, emptied)
        write_tombstone(run, FORGOTTEN, Deleted(why=WHY))
        write_tombstone(run, old.digest[:16], Deleted(why=WHY, shard=old.key, rows=rows), replacement=(new,))
    return rows


def _list_exports(run: Run) -> list[str]:
    return [entry.key for entry in run.store.entries("export/") if entry.key.endswith(".parquet")]


def _rewrite_export(run: Run, key: str, prompts: Prompts, *, delete: bool) -> int:
    """Erase the prompts and completions from an exported Parquet file if `delete` is true. Return the number of
    rows that contain them."""
    file = pq.ParquetFile(run.store.local_path(key))
    groups = range(file.num_row_groups)
    rows = sum(erase_prompts(file.read_row_group(group), prompts)[1] for group in groups)
    if rows and delete:
        with run.store.scratch() as scratch:
            path = scratch / "export.parquet"
            write_export((erase_prompts(file.read_row_group(group), prompts)[0] for group in groups), path, key=key)
            run.check_lock()
            run.store.delete(key)
            run.store.put(key, path)
    return rows
