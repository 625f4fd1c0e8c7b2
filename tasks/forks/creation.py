"""Creation of forks: runs that begin at an iteration of another run, share everything before it without a copy, and
continue with their own configuration."""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rheostat.infra.config import Settings, describe_difference
from rheostat.infra.costs import Cost, total
from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput
from rheostat.infra.plugins import register_target_folder
from rheostat.infra.store.chain import Chain
from rheostat.infra.store.checksums import seal
from rheostat.infra.store.contracts import Store
from rheostat.infra.store.dependencies import (
    Dependencies,
    dependency_records,
    record_dependencies,
    recorded_config,
)
from rheostat.infra.store.epochs import LEASES
from rheostat.infra.store.forks import FORK, FORKS, ExcludedPrompts, Fork, SharedPart, SharedStore
from rheostat.infra.store.inputs import PathNames, paths_in
from rheostat.infra.store.run_record import RECORD, new_record
from rheostat.infra.store.runs import JOURNAL, LOCK, MANIFESTS, Run, list_runs, open_run
from rheostat.infra.store.storage import open_store
from rheostat.infra.store.tombstones import FORGOTTEN, check_not_deleted, deleted_parts
from rheostat.tasks.config.documents import place_overrides
from rheostat.tasks.config.run import RunConfig, load_config, override_config, parse_config
from rheostat.tasks.forks.conflicts import (
    FIXED,
    IterationNotForkable,
    check_policies_stored,
    find_carry_over_conflicts,
    find_conflicts,
    find_fixed,
)
from rheostat.tasks.forks.replay import (
    FIXED_BY_ROLLOUTS,
    check_replay,
    find_replayed,
    must_rescore_evaluation,
    plan_replay,
    with_correction,
    with_kept_policies,
)
from rheostat.tasks.forks.sharing import Sharing, find_shared
from rheostat.tasks.forks.unaffected import count_unaffected_shards, find_unaffected_shards
from rheostat.tasks.run.dependencies import dependencies_of
from rheostat.tasks.run.preflight import with_recorded_defaults
from rheostat.tasks.views.metrics import sealed_iterations
from rheostat.tasks.views.runs import open_known_run

_POINT: Final = re.compile(r"(?P<run>[^@]+)@(?P<iteration>\d{1,9})")
_WRITTEN: Final = (RECORD, FORK, "chain/", JOURNAL)
"""Prefixes of the keys of the objects that the creation of a fork writes, in addition to locks."""


class ForkPlan(Settings):
    """Description of a fork before it is created or continued."""

    run: str
    """Name of the fork."""
    parent: str
    """Name of the run from which the fork is made."""
    iteration: int
    """Last iteration that the fork shares with its parent."""
    iterations: int
    """Last iteration to train."""
    changes: str
    """Settings that differ from those of the parent, each with its old and new value, or an empty string."""
    shared_objects: int
    """Number of stored objects that the fork shares."""
    shared_bytes: int
    """Total size of the shared objects in bytes. They are not copied."""
    replays: bool = False
    """Whether this is a what-if run, which trains on the stored rollouts of the parent."""
    reused_shards: int = 0
    """Number of rollout shards after `iteration` that the fork shares, because they contain no excluded prompt."""
    worker_seconds: float
    """Estimated time for which workers will be reserved, in seconds: the mean of the parent's iterations, times the
    number of iterations that are left to train. For shared rollouts, without the time to generate them."""
    price: float
    """Estimated cost of the iterations that are left to train, from the recorded prices of the parent's iterations."""
    exists: bool
    """Whether the fork was created before, so that it is only continued."""

    def lines(self) -> list[str]:
        """Describe the fork as lines for the terminal."""
        count = format_count(self.shared_objects, "object")
        what = "what-if" if self.replays else "fork   "
        first = f"{what}  {self.run}, from iteration {self.iteration} of {self.parent}"
        remaining = format_count(self.iterations - self.iteration, "iteration")
        remaining += " on stored rollouts" if self.replays else ""
        price = f", price about {self.price:,.4f}" if self.price else ""
        shards = format_count(self.reused_shards, "rollout shard")
        reused = f"reuses   {shards} without the excluded prompts, after iteration {self.iteration}"
        omitted = (
            " without rollouts" if self.replays else ", without rollouts of reused shards" * bool(self.reused_shards)
        )
        return [
            f"{first}{' (it exists and is continued)' if self.exists else ''}",
            f"shared   {count}, {self.shared_bytes / 1e6:,.1f} MB, not copied",
            *([reused] if self.reused_shards else []),
            f"changed  {self.changes or 'nothing'}",
            f"trains   {remaining}, up to iteration {self.iterations}",
            f"costs    about {self.worker_seconds:,.0f} worker seconds{price} (mean of {self.parent}'s iterations"
            f"{omitted})",
        ]


@dataclass(frozen=True, slots=True)
class PlannedFork:
    """Fork whose settings have been checked. It need not exist yet."""

    plan: ForkPlan
    config: RunConfig
    """Configuration of the fork."""
    fork: Fork
    dependencies: Dependencies
    """Code, data files and library versions with which the fork continues."""
    sharing: Sharing
    """Results of the parent that the fork shares."""


def parse_fork_point(text: str) -> tuple[str, int]:
    """Parse `RUN@N`, which names an iteration of a run. Raises BadInput if the text has another form."""
    match = _POINT.fullmatch(text)
    if match is None:
        raise BadInput(
            f"{text!r} does not name an iteration of a run. Write RUN@N, such as demo@12. demo@0 is the initial policy."
        )
    return match["run"], int(match["iteration"])


def request_fork(
    store: str,
    point: str,
    name: str,
    *,
    overrides: Sequence[str] = (),
    job: Path | None = None,
    is_what_if: bool = False,
    excluded_rows: Sequence[int] | None = None,
) -> PlannedFork:
    """Check whether a run can be forked with these overrides, and return the planned fork. Nothing is written.

    `point` has the form RUN@N, and `name` is the name of the fork. `job` is a job file that is used instead of the
    stored configuration of the run. With `is_what_if`, the fork also shares the rollouts of all later completed
    iterations. The fork never uses the training prompts in `excluded_rows`. If this argument is given, even if
    it is empty, the files of problems may have changed. The fork uses the stored prompts in any case. Raises BadInput
    with the setting that cannot change, or with the reason why the iteration cannot be shared.
    """
    run, number, num_sealed = _open_parent(store, point, is_what_if=is_what_if)
    fixed, kind = (FIXED | FIXED_BY_ROLLOUTS, "what-if run") if is_what_if else (FIXED, "fork")
    for override in overrides:
        if (reason := find_fixed(override.partition("=")[0].strip(), fixed)) is not None:
            raise BadInput(f"{kind} {name!r} of {point}: {reason}.")
    before = read_recorded_config(run, store)
    config = _build_config(run, store, name, overrides, job, num_sealed)
    if is_what_if:
        config = with_kept_policies(with_correction(config, overrides))
    for reason in find_conflicts(run, number, before, config, fixed):
        raise BadInput(f"{kind} {name!r} of {point}: {reason}.")
    for reason in find_carry_over_conflicts(run, number, config):
        raise IterationNotForkable(f"{kind} {name!r} of {point}: {reason}.")
    if config.iterations <= number:
        raise BadInput(
            f"{kind} {name!r} of {point}: iterations is {config.iterations}, but the fork begins after iteration "
            f"{number}. Set iterations to {number + 1} or more."
        )
    excluded = _excluded_prompts(run, number, excluded_rows or ())
    existing = _find_existing(run, number, config, excluded, is_what_if=is_what_if)
    dependencies = dependencies_of(config, run)
    _check_data(run, number, config, dependencies, may_change=bool(excluded) or excluded_rows is not None)
    last = min(num_sealed, config.iterations) if is_what_if else number
    if existing is None:
        check_policies_stored(run, number, config, num_sealed=num_sealed)
        if is_what_if:
            check_replay(run, range(number + 1, last + 1), config, dependencies)
            sharing = plan_replay(run, number, last, config, dependencies)
        else:
            shards = find_unaffected_shards(run, number, config, dependencies, excluded) if excluded_rows else None
            rescores = must_rescore_evaluation(run, number, config, dependencies)
            sharing = Sharing(number, rescores=rescores, shards=shards or frozenset())
        shared, num_bytes = find_shared(run, sharing, name=name)
        fork = Fork(
            parent=run.name,
            iteration=number,
            parts=_shared_parts(run, number),
            shared=shared,
            replayed=find_replayed(run, sharing),
            excluded=excluded,
        )
        _find_leftovers(open_store(f"{store.rstrip('/')}/{name}"), name)
    else:
        assert existing.fork is not None, "it is a fork"
        fork, sharing = existing.fork, Sharing(number)
        last = min(last, max(fork.replayed, default=number))
        num_bytes = sum(entry.bytes for entry in existing.store.entries("") if fork.inherits(entry.key))
    remaining, reused = (last if is_what_if else config.iterations) - number, count_unaffected_shards(run, fork)
    mean, without_rollouts = (_mean_cost(run, without=names) for names in ((), ("rollout",)))
    generated = 0 if is_what_if else remaining - reused.iterations
    plan = ForkPlan(
        run=name,
        parent=run.name,
        iteration=number,
        iterations=number + remaining,
        changes=describe_difference(*run.settings_beside(config)),
        shared_objects=sum(map(len, fork.shared.values())),
        shared_bytes=num_bytes,
        replays=is_what_if,
        reused_shards=reused.shards,
        worker_seconds=without_rollouts.worker_seconds * (remaining - generated) + mean.worker_seconds * generated,
        price=without_rollouts.price * (remaining - generated) + mean.price * generated,
        exists=existing is not None,
    )
    return PlannedFork(plan, config, fork, dependencies, sharing)


def _open_parent(store: str, point: str, *, is_what_if: bool) -> tuple[Run, int, int]:
    """Return the run that is forked, the last shared iteration, and the number of completed iterations of the run.
    Raises BadInput if the run cannot be forked at all, or not at this iteration."""
    parent, number = parse_fork_point(point)
    run = open_known_run(store, parent)
    check_not_deleted(run)
    if FORGOTTEN in deleted_parts(run):
        raise BadInput(
            f"run {parent!r} cannot be forked, because `rheostat forget` removed prompts from its rollouts. Start a "
            "new run with data that does not contain them."
        )
    num_sealed = len(sealed_iterations(run))
    if number > num_sealed:
        raise BadInput(
            f"{point}: run {parent!r} has no completed iteration {number}. Choose one from 0 (the initial policy) to "
            f"{num_sealed}."
        )
    if is_what_if and number == num_sealed:
        raise BadInput(
            f"{point}: run {parent!r} has no completed iteration after iteration {number}, so there are no rollouts to "
            f"use. Choose an earlier start, such as {parent}@0."
        )
    return run, number, num_sealed


def _excluded_prompts(run: Run, number: int, rows: Sequence[int]) -> tuple[ExcludedPrompts, ...]:
    """Return the prompts that a fork of a run at iteration `number` never uses: those that the run never uses, and
    those with the given row numbers."""
    earlier = () if run.fork is None else run.fork.excluded
    own = [ExcludedPrompts(after=number, rows=tuple(sorted(rows)))] if rows else []
    return (*(each.model_copy(update={"after": min(each.after, number)}) for each in earlier), *own)


def _shared_parts(run: Run, number: int) -> list[SharedPart]:
    own = SharedPart(iteration=number, fingerprint=run.record.fingerprint, config=run.record.config)
    earlier = [] if run.fork is None else run.fork.parts
    return [part.model_copy(update={"iteration": min(part.iteration, number)}) for part in (*earlier, own)]


def create_fork(planned: PlannedFork) -> Run:
    """Create a fork, or open it if it exists, and return it. Before that, delete the leftovers of an interrupted
    creation, or an existing fork of this name that has other settings and no own results.

    Raises RunLocked if another process has locked the fork. Raises BadInput if another run or other files have its
    name, or if shared objects have been deleted since the fork was planned.
    """
    store, name, fork = planned.config.store, planned.config.name, planned.fork
    home = store.rstrip("/")
    parent, own = open_run(store, fork.parent), open_store(f"{home}/{name}")
    stores = {owner: open_store(f"{home}/{owner}") for owner in fork.shared}
    record = new_record(name, planned.config.identity(parent.record.config))
    run = Run(SharedStore(own, fork, stores), record)
    with run.lock():
        expected = (parent, fork.iteration, planned.config, fork.excluded)
        if _find_existing(*expected, is_what_if=planned.plan.replays) is not None:
            return open_run(store, name)
        for key in _find_leftovers(own, name):
            own.delete(key)
        own.put(FORK, fork.seal())
        for directory in stores.values():
            directory.put(f"{FORKS}{name}.json", seal({"fork": name}))
        shared, _ = find_shared(parent, planned.sharing, name=name)
        if shared != fork.shared:
            for directory in stores.values():
                directory.delete(f"{FORKS}{name}.json")
            own.delete(FORK)
            raise BadInput(
                f"fork {name!r} was not created, because run {fork.parent!r} has changed meanwhile. Run the same "
                "command again."
            )
        record_dependencies(
            run,
            planned.dependencies,
            iteration=fork.iteration + 1,
            folder=PathNames(planned.config).folder,
            accept_change=True,
        )
        Chain(run).link("fork")
        own.put(RECORD, run.record.seal())  # last, because from now on the run exists
    return open_run(store, name)


def _find_leftovers(own: Store, name: str) -> list[str]:
    """Return the keys of the objects that an interrupted creation of a fork, or a fork without own results, has left in
    its directory, in the order in which they must be deleted. Raises BadInput if the directory contains anything
    else."""
    keys = [entry.key for entry in own.entries("") if not entry.key.startswith((LOCK, LEASES))]
    foreign = [key for key in keys if FORK not in keys or not key.startswith(_WRITTEN)]
    if foreign:
        raise BadInput(
            f"the folder {name!r} in the store {own.uri.rpartition('/')[0]} already contains files, such as "
            f"{foreign[0]!r}. Choose another name for the fork."
        )
    return sorted(keys, key=lambda key: key != RECORD)  # the record first: without it, there is no run


def read_recorded_config(run: Run, store: str) -> RunConfig:
    """Return the configuration that is stored with a run. Other settings have their defaults."""
    document = {**recorded_config(run), "name": run.name, "store": store}
    return parse_config(document, source=f"run {run.name}", recorded=True)


def _build_config(
    run: Run, store: str, name: str, overrides: Sequence[str], job: Path | None, num_sealed: int
) -> RunConfig:
    """Return the configuration of a fork. Settings that are not given have the values of the run that is forked."""
    if job is not None:
        register_target_folder(job.parent)
        config = load_config(job, [*overrides, f"name={json.dumps(name)}", f"store={json.dumps(store)}"])
        of_parent = with_recorded_defaults(config.model_copy(update={"name": run.name}))
        return of_parent.model_copy(update={"name": config.name})
    records = dependency_records(run)
    folder = Path(records[-1].folder) if records and records[-1].folder else Path.cwd()
    register_target_folder(folder)
    document: dict[str, object] = {"iterations": num_sealed, **recorded_config(run), "name": name, "store": store}
    placed = place_overrides(overrides, Path.cwd(), job=folder)
    return override_config(document, placed, source=f"fork of run {run.name}", recorded=True)


def _mean_cost(run: Run, *, without: Collection[str] = ()) -> Cost:
    """Return the mean costs of the completed iterations of a run, summed over all roles except those in `without`. If
    all of them used rollouts of an earlier run, return the mean costs of that run."""
    numbered = [each for each in enumerate(sealed_iterations(run), start=1) if each[1].provenance.costs]
    generated = [seal for number, seal in numbered if without or not run.replays(number)]
    if numbered and not generated and run.fork is not None:
        home, parent = run.store.uri.rpartition("/")[0], run.fork.parent
        return _mean_cost(open_run(home, parent)) if parent in list_runs(home) else Cost()
    costs = [total(cost for role, cost in each.provenance.costs.items() if role not in without) for each in generated]
    whole, count = total(costs), max(len(costs), 1)
    return Cost(worker_seconds=whole.worker_seconds / count, price=whole.price / count)


def _find_existing(
    parent: Run, number: int, config: RunConfig, excluded: tuple[ExcludedPrompts, ...], *, is_what_if: bool
) -> Run | None:
    """Return the fork if it was created before with the same configuration, or None. Raises BadInput if another run has
    its name, or if the fork has own results that were computed with other settings."""
    store, name = config.store, config.name
    if name not in list_runs(store):
        return None
    run = open_run(store, name)
    existing = run.fork
    replays = existing is not None and max(existing.replayed, default=0) > existing.iteration
    if existing is None or (existing.parent, existing.iteration, replays) != (parent.name, number, is_what_if):
        kind = "what-if run" if is_what_if else "fork"
        raise BadInput(
            f"a run {name!r} already exists in {store!r}, and it is not a {kind} of {parent.name}@{number}. Choose "
            "another name."
        )
    if existing.excluded != excluded:
        raise BadInput(f"fork {name!r} already exists, and it excludes other prompts. Choose another name.")
    changes = describe_difference(*run.settings_beside(config))
    has_own_results = any(not existing.inherits(entry.key) for entry in run.store.entries(MANIFESTS))
    if changes and has_own_results:
        raise BadInput(f"fork {name!r} already exists with other settings: {changes}. Choose another name.")
    return None if changes else run


def _check_data(run: Run, number: int, config: RunConfig, now: Dependencies, *, may_change: bool) -> None:
    """Raise BadInput if a file has changed since the shared iterations. `now` contains the present files. With
    `may_change`, files of problems may change, because the user may have removed prompts that are excluded anyway."""
    records = [each for each in dependency_records(run) if each.iteration <= max(number, 1)]
    names = PathNames(config, run.record.config)
    problems = tuple(names.name(path) for path in paths_in(config.data)) if may_change else ()
    for record in records[-1:]:
        files = {
            name: content
            for name, content in now.data.items()
            if not any(f"{name}/".startswith(f"{each}/") for each in problems)
        }
        for change in record.dependencies.changes(record.dependencies.model_copy(update={"data": files})):
            raise BadInput(
                f"fork {config.name!r} of {run.name}@{number}: {change}. A fork continues with the data of its parent. "
                "Restore the file."
            )
