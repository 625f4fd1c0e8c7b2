"""Removal of users' prompts and their completions from a run. Lineage, rewards and lengths are kept.

A shard with such data is written again without it, a tombstone names the new shard that replaces it, and the old shard
is deleted. Readers follow the tombstone, and every manifest stays unchanged.
"""

from collections.abc import Mapping, Sequence
from graphlib import TopologicalSorter

import pyarrow.parquet as pq

from rheostat.infra.config import Settings
from rheostat.infra.errors import BadInput, RunLocked
from rheostat.infra.store.chain import complete_manifests
from rheostat.infra.store.dependencies import dependency_records
from rheostat.infra.store.garbage import collect_garbage, delete_all
from rheostat.infra.store.runs import LOCK, Run, list_runs, open_run, run_forks, run_store
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


def with_relatives(runs: Sequence[Run]) -> list[Run]:
    """Return the runs together with all runs that share shards with them: their forks, and the runs whose shards they
    share. A fork comes before the runs whose shards it shares, because it must write its new shards before the old ones
    are deleted. Raises RunLocked if a fork is being created."""
    found, forks, pending = dict[str, Run](), dict[str, list[str]](), [*runs]
    while pending:
        run = pending.pop()
        if run.name not in found:
            found[run.name], forks[run.name] = run, [fork.name for fork in _open_forks(run)]
            owners = [] if run.fork is None else [name for name in run.fork.shared if name]
            pending += [open_run(_home_of(run), name) for name in (*forks[run.name], *owners)]
    return [found[name] for name in TopologicalSorter(forks).static_order()]


def _open_forks(run: Run) -> list[Run]:
    """Open the forks that share shards of a run. What an interrupted creation of a fork has left does not count,
    because the next try deletes it."""
    existing, opened = {*list_runs(_home_of(run))}, list[Run]()
    for name in run_forks(run):
        if name in existing:
            opened.append(open_run(_home_of(run), name))
        elif run_store(_home_of(run), name).lock_state(LOCK).state == "held":
            raise RunLocked(f"fork {name!r} of run {run.name!r} is being created. Run this command again after that.")
    return opened


def _home_of(run: Run) -> str:
    return run.store.uri.rpartition("/")[0]


def _needed_by_forks(run: Run) -> set[str]:
    """Return the keys of shards that forks share and have not replaced."""
    return {
        key
        for fork in _open_forks(run)
        if fork.fork is not None
        for key in {*fork.fork.shared.get(run.name, ())} - {*replaced_shards(fork.manifests())}
    }


def remove_everywhere(store: str, names: Sequence[str], ids: frozenset[str], *, delete: bool) -> list[Forgotten]:
    """Report the data that the named runs, and all runs that share shards with them, have of the given prompts. If
    `delete` is true, also remove it. Return one report per run.

    Nothing is removed before all runs were read without an error. If a call was interrupted, the next call finishes its
    work. Raises RunLocked if a process has locked one of the runs, and BadInput if one was forked meanwhile.
    """
    reports = []
    for run in with_relatives([open_run(store, name) for name in names]):
        with run.lock_without_epoch():
            reports.append(remove_prompts(run, ids, delete=False))
    for index, report in enumerate(reports if delete else ()):
        if report.prompts or report.exports:
            with open_run(store, report.run).lock() as locked_run:
                reports[index] = remove_prompts(locked_run, ids, delete=True)
    if delete and {run.name for run in with_relatives([open_run(store, name) for name in names])} - {
        report.run for report in reports
    }:
        raise BadInput("a run was forked while prompts were removed. Run the same command again.")
    return reports


def remove_prompts(run: Run, ids: frozenset[str], *, delete: bool) -> Forgotten:
    """Report the data that a run has of the given prompts. If `delete` is true, also remove it, which requires a locked
    run.

    If a call was interrupted, the next call finishes its work. Shards that a fork shares are deleted only after the
    fork has replaced them. Raises Damaged before anything is deleted if a record of the run is missing, because shards
    that are named only there could not be found.
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
        delete_all(run, sorted({*replaced_shards(run.manifests())} - _needed_by_forks(run)))
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
