"""Creation of forks: runs that begin at an iteration of another run, share everything before it without a copy, and
continue with their own configuration."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import JsonValue

from rheostat.infra.config import Settings, changed_keys, describe_difference
from rheostat.infra.costs import Cost, total
from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput, Damaged, RunLocked
from rheostat.infra.plugins import register_target_folder
from rheostat.infra.store.bundles import CONTENTS, has_bundle
from rheostat.infra.store.chain import Chain
from rheostat.infra.store.checksums import seal
from rheostat.infra.store.dependencies import (
    DEPENDENCIES,
    Dependencies,
    dependency_records,
    record_dependencies,
    recorded_config,
)
from rheostat.infra.store.forks import FORK, FORKS, Fork, SharedPart
from rheostat.infra.store.inputs import PathNames
from rheostat.infra.store.run_record import RECORD, new_record
from rheostat.infra.store.runs import JOURNAL, LOCK, MANIFESTS, Run, list_runs, open_run, run_store
from rheostat.infra.store.shards import tombstone_key
from rheostat.infra.store.storage import open_store
from rheostat.infra.store.tombstones import FORGOTTEN, check_not_deleted, deleted_parts, needed_objects
from rheostat.tasks.auxiliary import find_stored_teacher
from rheostat.tasks.config.documents import place_overrides
from rheostat.tasks.config.run import LAYOUT, RunConfig, load_config, override_config, parse_config
from rheostat.tasks.run.dependencies import dependencies_of
from rheostat.tasks.run.iteration import carry_over_before
from rheostat.tasks.run.keys import TEACHER, StageKey, evaluation_key, iteration_key
from rheostat.tasks.run.preflight import with_recorded_defaults
from rheostat.tasks.run.reverts import critic_after, has_reverted, policy_after
from rheostat.tasks.run.states import STATES, updates_since_state
from rheostat.tasks.views.metrics import sealed_iterations
from rheostat.tasks.views.runs import open_known_run

_POINT: Final = re.compile(r"(?P<run>[^@]+)@(?P<iteration>\d{1,9})")
_OWN_FOLDERS: Final = ("rescore/", "recredit/", "retention/")
"""Prefixes of keys of results that a fork does not share as they are."""

FIXED: Final = {
    "seed": "it chose the prompts and random numbers of the shared iterations",
    "data": "the shared iterations used these problems, and the fork continues after the last one",
    "policy": "the shared iterations begin with this policy and its tokenizer",
    "warmup": "the shared iterations begin with the policy that it trained",
    "preferences": "the shared iterations begin with the models that it trained",
    "dpo": "the shared iterations begin with the policy that it trained",
    "rollout.environment": "the stored prompts are written for this environment",
}
"""Settings that a fork cannot change, each with the reason."""

FIXED_BY_STATE: Final = {
    "update.lora": "the weights of the shared policy depend on it",
    "update.freeze": "the optimizer state of the shared policy depends on it",
    "update.dtype": "the optimizer state of the shared policy depends on it",
    "update.optimizer.kind": "the optimizer state of the shared policy depends on it",
}
"""Settings that a fork cannot change after the first iteration, each with the reason."""


class ForkPlan(Settings):
    """Description of a fork before it is created or continued."""

    run: str
    """Name of the fork."""
    parent: str
    """Name of the run from which the fork is made."""
    iteration: int
    """Last iteration that the fork shares with its parent."""
    iterations: int
    """Number of iterations of the fork, including the shared ones."""
    changes: str
    """Settings that differ from those of the parent, each with its old and new value, or an empty string."""
    shared_objects: int
    """Number of stored objects that the fork shares."""
    shared_bytes: int
    """Total size of the shared objects in bytes. They are not copied."""
    worker_seconds: float
    """Estimated time for which workers will be reserved, in seconds: the mean of the parent's iterations, times the
    number of iterations that are left to train."""
    price: float
    """Estimated cost of the iterations that are left to train, from the recorded prices of the parent's iterations."""
    exists: bool
    """Whether the fork was created before, so that it is only continued."""

    def lines(self) -> list[str]:
        """Describe the fork as lines for the terminal."""
        count = format_count(self.shared_objects, "object")
        first = f"fork     {self.run}, from iteration {self.iteration} of {self.parent}"
        remaining = format_count(self.iterations - self.iteration, "iteration")
        price = f", price about {self.price:,.4f}" if self.price else ""
        return [
            f"{first}{', which exists and is continued' if self.exists else ''}",
            f"shared   {count}, {self.shared_bytes / 1e6:,.1f} MB, not copied",
            f"changed  {self.changes or 'nothing'}",
            f"trains   {remaining}, up to iteration {self.iterations}",
            f"costs    about {self.worker_seconds:,.0f} worker seconds{price}, by the mean of {self.parent}",
        ]


@dataclass(frozen=True, slots=True)
class PlannedFork:
    """Checked request to create a fork."""

    plan: ForkPlan
    config: RunConfig
    """Configuration of the fork."""
    fork: Fork
    dependencies: Dependencies
    """Code, data files and libraries with which the fork continues."""


def parse_fork_point(text: str) -> tuple[str, int]:
    """Parse `RUN@N`, which names an iteration of a run. Raises BadInput if the text has another form."""
    match = _POINT.fullmatch(text)
    if match is None:
        raise BadInput(
            f"{text!r} does not name an iteration of a run. Write RUN@N, such as demo@12. demo@0 is the initial policy."
        )
    return match["run"], int(match["iteration"])


def request_fork(
    store: str, point: str, name: str, *, overrides: Sequence[str] = (), job: Path | None = None
) -> PlannedFork:
    """Check whether a run can be forked with these overrides, and return the request. Nothing is written.

    `point` has the form RUN@N, and `name` is the name of the fork. `job` is a job file that is used instead of the
    stored configuration of the run. Raises BadInput with the setting that cannot change, or with the reason why the
    iteration cannot be shared.
    """
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
    for override in overrides:
        if (reason := _find_reason(override.partition("=")[0].strip(), FIXED)) is not None:
            raise BadInput(f"fork {name!r} of {point}: {reason}.")
    before = _parse_recorded(run, store)
    config = _build_config(run, store, name, overrides, job, num_sealed)
    identity = config.identity(run.record.config)
    for reason in _find_conflicts(run, number, before, config, identity):
        raise BadInput(f"fork {name!r} of {point}: {reason}.")
    if config.iterations <= number:
        raise BadInput(
            f"fork {name!r} of {point}: iterations is {config.iterations}, so that no iteration is left to train. Set "
            f"iterations to {number + 1} or more."
        )
    _check_policy_stored(run, number, num_sealed)
    shared, num_bytes = _find_shared(run, number)
    own = SharedPart(iteration=number, fingerprint=run.record.fingerprint, config=run.record.config)
    earlier = [] if run.fork is None else run.fork.parts
    parts = [part.model_copy(update={"iteration": min(part.iteration, number)}) for part in (*earlier, own)]
    fork = Fork(parent=parent, iteration=number, parts=parts, shared=shared)
    mean = _mean_cost(run)
    plan = ForkPlan(
        run=name,
        parent=parent,
        iteration=number,
        iterations=config.iterations,
        changes=describe_difference(run.record.config, identity),
        shared_objects=sum(map(len, shared.values())),
        shared_bytes=num_bytes,
        worker_seconds=mean.worker_seconds * (config.iterations - number),
        price=mean.price * (config.iterations - number),
        exists=_exists(store, name, fork, identity),
    )
    return PlannedFork(plan, config, fork, _check_data(run, number, config))


def create_fork(request: PlannedFork) -> Run:
    """Create a fork, or open it if it exists, and return it. Raises RunLocked if another process creates the same fork,
    and BadInput if shared objects have been deleted since the request was checked."""
    store, name, fork = request.config.store, request.config.name, request.fork
    if request.plan.exists:
        return open_run(store, name)
    parent = open_run(store, fork.parent)
    record = new_record(name, request.config.identity(parent.record.config))
    own = open_store(f"{store.rstrip('/')}/{name}")
    with own.lock(LOCK) as lease:
        if lease is None:
            raise RunLocked(f"fork {name!r} in {store} is being created by another process. Wait until it ends.")
        if own.find(FORK) != fork.seal():  # a fork with other settings was not completed
            for entry in own.entries(""):
                if entry.key != LOCK:
                    own.delete(entry.key)
        own.put(FORK, fork.seal())
        for owner in fork.shared:
            open_store(f"{store.rstrip('/')}/{owner}").put(f"{FORKS}{name}.json", seal({"fork": name}))
        if _find_shared(parent, fork.iteration)[0] != fork.shared:
            raise BadInput(
                f"fork {name!r}: objects of run {fork.parent!r} were deleted meanwhile. Run the same command again."
            )
    run = Run(run_store(store, name), record)
    with run.lock():
        record_dependencies(
            run,
            request.dependencies,
            iteration=fork.iteration + 1,
            folder=PathNames(request.config).folder,
            accept_change=True,
        )
        Chain(run).link(iteration_key(fork.iteration) if fork.iteration else evaluation_key(0))
        run.store.put(RECORD, record.seal())  # last, because from now on the run exists
    return open_run(store, name)


def _parse_recorded(run: Run, store: str) -> RunConfig:
    document = {**recorded_config(run), "name": run.name, "store": store}
    return parse_config(document, source=f"run {run.name}", recorded=True)


def _build_config(
    run: Run, store: str, name: str, overrides: Sequence[str], job: Path | None, num_sealed: int
) -> RunConfig:
    """Return the configuration of a fork. Settings that are not given have the values of the run that is forked."""
    if job is not None:
        register_target_folder(job.parent)
        config = load_config(job, overrides).model_copy(update={"name": run.name, "store": store})
        return with_recorded_defaults(config).model_copy(update={"name": name})
    records = dependency_records(run)
    folder = Path(records[-1].folder) if records and records[-1].folder else Path.cwd()
    register_target_folder(folder)
    document: dict[str, object] = {"iterations": num_sealed, **recorded_config(run), "name": name, "store": store}
    placed = place_overrides(overrides, Path.cwd(), job=folder)
    return override_config(document, placed, source=f"fork of run {run.name}", recorded=True)


def _find_conflicts(
    run: Run, number: int, before: RunConfig, after: RunConfig, identity: Mapping[str, JsonValue]
) -> Iterator[str]:
    """Yield the reasons why a fork cannot share the results of a run up to an iteration. `before` and `after` are the
    configurations of the run and of the fork, and `identity` contains the settings of the fork that affect results."""
    changed = [key for key in changed_keys(run.record.config, identity) if key not in LAYOUT]
    fixed = FIXED | (FIXED_BY_STATE if number else {})
    yield from filter(None, (_find_reason(key, fixed) for key in changed))
    if (longest := before.rollout.sampling.max_new_tokens) < after.rollout.sampling.max_new_tokens:
        yield (
            f"rollout.sampling.max_new_tokens cannot be above {longest}, because the stored prompts leave room for "
            "completions of this length only"
        )
    yield from _find_model_conflicts(run, number, before, after)
    yield from _find_carry_over_conflicts(run, number, after)


def _find_reason(key: str, fixed: Mapping[str, str]) -> str | None:
    """Return a sentence that says why a setting cannot change, if it is in one of the tables `fixed`."""
    reasons = (reason for table, reason in fixed.items() if f"{key}.".startswith(f"{table}."))
    return next((f"{key} cannot change, because {reason}" for reason in reasons), None)


def _find_model_conflicts(run: Run, number: int, before: RunConfig, after: RunConfig) -> Iterator[str]:
    """Yield the reasons why a fork cannot use the models that a run has stored in addition to the policy."""
    if number and after.algorithm.value_model is not None and before.algorithm.value_model is None:
        yield f"algorithm.kind cannot be {after.algorithm.label!r}, because the shared iterations trained no critic"
    teacher = find_stored_teacher(after)
    if teacher is not None and run.has(TEACHER) and teacher != find_stored_teacher(before):
        yield "algorithm.distillation.teacher cannot change, because the run has stored the teacher"
    for term, reward in after.scoring.hosted_rewards.items():
        if run.has(StageKey.reward_model(term)) and before.scoring.hosted_rewards.get(term) != reward:
            yield f"the model of reward {term!r} cannot change, because it is stored. Give the new reward another name"


def _find_carry_over_conflicts(run: Run, number: int, after: RunConfig) -> Iterator[str]:
    """Yield the reasons why a fork cannot continue from the state that an iteration leaves to the next one."""
    if not after.revert_alarms and any(has_reverted(run, each) for each in range(1, number + 1)):
        yield "alarms cannot be removed, because an alarm has reverted a shared iteration"
    left = carry_over_before(run, number + 1)
    if left.num_leftover and after.rollout.dynamic is None:
        yield f"rollout.dynamic cannot be removed, because iteration {number} leaves groups to the next one"
    if left.num_partial and after.rollout.partial is None:
        yield f"rollout.partial cannot be removed, because iteration {number} leaves partial completions"


def _check_policy_stored(run: Run, number: int, num_sealed: int) -> None:
    """Raise BadInput if the policy or its optimizer state after an iteration is not stored, with the nearest iterations
    whose policy is stored."""
    if _is_policy_stored(run, number):
        return
    stored = [each for each in range(num_sealed + 1) if _is_policy_stored(run, each)]
    nearest = sorted(sorted(stored, key=lambda each: abs(each - number))[:3])
    raise BadInput(
        f"run {run.name!r} no longer has the policy of iteration {number} with its optimizer state, because "
        f"retention.keep_last deletes old policies. The nearest iterations with a policy are "
        f"{', '.join(map(str, nearest)) or 'none'}. Set retention.keep_every to keep more of them."
    )


def _is_policy_stored(run: Run, number: int) -> bool:
    manifests = [policy_after(run, number)]
    with suppress(Damaged):  # there is no critic
        manifests.append(critic_after(run, number))
    weights = [ref for each in manifests for name, ref in each.bundles.items() if name not in STATES]
    return all(has_bundle(run.store, ref) for ref in weights) and not updates_since_state(run, number)[1]


def _find_shared(run: Run, number: int) -> tuple[dict[str, list[str]], int]:
    """Return the keys of the objects up to an iteration, by name of the run that stores them, and their total size in
    bytes. Raises Damaged if an object is missing."""
    manifests = run.manifests()
    results = [each for each in manifests if _is_before(run, each.key, number)]
    deletions = [each for each in manifests if each.key.startswith("retention/")]
    objects = needed_objects([*results, *deletions])
    named = {shard.digest for each in results for shard in each.shards}
    named |= {bundle.digest for each in results for bundle in each.bundles.values()}
    tombstones = {tombstone_key(digest) for digest in named}
    tombstones |= {f"retention/{iteration_key(each)}" for each in range(1, number + 1)}
    sizes = {entry.key: entry.bytes for entry in run.store.entries("")}
    keys = {f"{MANIFESTS}{each.key}.json" for each in results}
    keys |= {f"{MANIFESTS}{each.key}.json" for each in deletions if each.key in tombstones}
    keys |= {shard.key for shard in objects.shards}
    if absent := sorted(keys - sizes.keys()):
        raise Damaged(f"run {run.name!r}: {absent[0]!r} is missing. Restore it from a copy of the run.")
    bundles = {bundle.key for bundle in objects.bundles if f"{bundle.key}/{CONTENTS}" in sizes}
    keys |= {key for key in sizes if "/".join(key.split("/")[:2]) in bundles}
    keys |= {key for key in sizes if key.startswith(JOURNAL) and _is_journal_before(run, key, number)}
    owners = {} if run.fork is None else {key: name for name, some in run.fork.shared.items() if name for key in some}
    shared: dict[str, list[str]] = {}
    for key in sorted(keys):
        shared.setdefault(owners.get(key, run.name), []).append(key)
    return shared, sum(sizes[key] for key in keys)


def _is_before(run: Run, key: str, number: int) -> bool:
    """Return whether a result belongs to the part of a run that a fork at an iteration shares."""
    if key.startswith(_OWN_FOLDERS):
        return False
    if key.startswith("it-"):
        return StageKey.parse(key).iteration <= number
    if key.startswith("eval-"):
        evaluated = StageKey.parse(key).evaluation
        return evaluated <= number and run.has(StageKey.of(evaluation_key(evaluated), "summary"))
    return True


def _is_journal_before(run: Run, key: str, number: int) -> bool:
    name = key.removeprefix(JOURNAL).removesuffix(".json")
    if name.startswith(DEPENDENCIES):
        first, records = int(name.removeprefix(DEPENDENCIES)), dependency_records(run)
        return first == 1 or records[first - 1].iteration <= number
    match = re.match(r"placement/(it|eval)-(\d+)/", name)
    return match is not None and int(match[2]) <= number


def _mean_cost(run: Run) -> Cost:
    """Return the mean costs of the completed iterations of a run, summed over all roles."""
    costs = [total(each.provenance.costs.values()) for each in sealed_iterations(run) if each.provenance.costs]
    whole, count = total(costs), max(len(costs), 1)
    return Cost(worker_seconds=whole.worker_seconds / count, price=whole.price / count)


def _exists(store: str, name: str, fork: Fork, identity: Mapping[str, JsonValue]) -> bool:
    """Return whether the fork was created before. Raises BadInput if another run has its name."""
    if name not in list_runs(store):
        return False
    run = open_run(store, name)
    has = run.fork
    if has is None or (has.parent, has.iteration) != (fork.parent, fork.iteration):
        raise BadInput(
            f"a run {name!r} already exists in {store!r}, and it is not a fork of {fork.parent}@{fork.iteration}. "
            "Choose another name."
        )
    if changes := describe_difference(run.record.config, identity):
        raise BadInput(f"fork {name!r} already exists with other settings: {changes}. Choose another name.")
    return True


def _check_data(run: Run, number: int, config: RunConfig) -> Dependencies:
    """Return the code, data files and library versions with which a fork continues. Raises BadInput if a data file has
    changed since the shared iterations."""
    now = dependencies_of(config, run)
    records = [each for each in dependency_records(run) if each.iteration <= max(number, 1)]
    for record in records[-1:]:
        for change in record.dependencies.changes(record.dependencies.model_copy(update={"data": now.data})):
            raise BadInput(
                f"fork {config.name!r} of {run.name}@{number}: {change}. A fork continues with the data of its parent. "
                "Restore the file."
            )
    return now
