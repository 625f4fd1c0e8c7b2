"""Completion of an iteration by its seal (the last manifest), and deletion of policies and rollouts that the retention
settings no longer keep."""

from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta

from rheostat.infra.errors import Damaged
from rheostat.infra.store.bundles import CONTENTS, BundleRef, delete_bundle
from rheostat.infra.store.garbage import delete_all
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.readers import bundles_in_use
from rheostat.infra.store.runs import Run, objects_of_forks
from rheostat.infra.store.shards import tombstone_key
from rheostat.infra.store.tombstones import Deleted, deleted_parts, write_tombstone
from rheostat.models.records.versions import policy_of
from rheostat.tasks.alarms import describe_triggered
from rheostat.tasks.auxiliary import auxiliary_manifests
from rheostat.tasks.costs import Reservation, iteration_costs
from rheostat.tasks.run.iteration import Iteration, carry_over_after, carry_over_before
from rheostat.tasks.run.keys import StageKey, iteration_key, iteration_numbers
from rheostat.tasks.run.open_run import OpenRun
from rheostat.tasks.run.references import recorded_rule, reference_iteration, select_reference
from rheostat.tasks.run.rescorings import DerivedResult, list_derived_results
from rheostat.tasks.run.reverts import has_reverted, policy_after
from rheostat.tasks.run.solve_rates import summarize_choices
from rheostat.tasks.run.stages import append_to_chain, commit_decision, controller_provenance
from rheostat.tasks.run.states import newest_with_state, updates_since_state


def seal_iteration(open_run: OpenRun, iteration: Iteration) -> Manifest:
    """Commit the seal of an iteration: the last manifest, which marks the iteration as complete. The seal lists the
    other manifests of the iteration, its metrics, and the state with which the next iteration starts."""
    plans = [batch.plan_manifest for batch in iteration.batches]
    rollouts, scores = iteration.shard_manifests("rollout"), iteration.shard_manifests("scoring")
    auxiliary, credit, update = auxiliary_manifests(open_run, iteration), iteration.credit, iteration.update
    own_rollouts, own_scores = ([m for m in some if not open_run.run.inherits(m.key)] for some in (rollouts, scores))
    seconds = {
        "rollout": max((m.provenance.seconds["stage"] for m in own_rollouts), default=0.0),
        "scoring": sum(m.provenance.seconds["worker"] for m in own_scores),
        "scoring_after": _scoring_seconds_after(own_scores, own_rollouts),
        "estimates": sum(m.provenance.seconds["stage"] for m in auxiliary),
        "credit": credit.provenance.seconds["stage"],
        "update": update.provenance.seconds["stage"],
        "total": (datetime.now(UTC) - _start_time(open_run.run, plans[0], own_scores, credit)).total_seconds(),
        **{
            name: sum(m.provenance.seconds[name] for m in own_rollouts)  # summed over workers, which load in parallel
            for name in ("weights_seconds", "weights_bytes")
        },
        **_environment_seconds(own_rollouts),
    }
    costs = open_run.account.unsealed.pop(iteration.number, None) or iteration_costs(open_run, iteration, Reservation())
    # policy of the update, or the policy that an alarm reverted to
    policy = policy_after(open_run.run, iteration.number)
    sealed = commit_decision(
        open_run,
        iteration.stage_key("seal"),
        parents=[*plans, *rollouts, *scores, *auxiliary, credit, update, *([] if policy == update else [policy])],
        metrics={
            "prompts": sum(len(batch.plan.rows) for batch in iteration.batches),
            **summarize_choices(iteration),
            **iteration.metrics,
        },
        detail={
            "policy": policy_of(policy).digest,
            **carry_over_after(iteration, open_run.settings.rollout.dynamic).detail(),
        },
        provenance=controller_provenance(
            seconds=seconds,
            requests=open_run.count_new_requests(),
            costs=costs,
            alarms=describe_triggered(open_run, iteration),
        ),
    )
    append_to_chain(open_run, iteration.key)
    return sealed


def _start_time(run: Run, plan: Manifest, scores: Sequence[Manifest], credit: Manifest) -> datetime:
    """Return the start time of an iteration. In a what-if run, which shares plans and rollouts, the work on its first
    own scores is the start, or on its advantages if it has no own scores."""
    if not run.inherits(plan.key):
        return datetime.fromisoformat(plan.provenance.created)
    return min(
        datetime.fromisoformat(m.provenance.created) - timedelta(seconds=m.provenance.seconds["stage"])
        for m in (*scores, credit)
    )


def _scoring_seconds_after(scores: Sequence[Manifest], rollouts: Sequence[Manifest]) -> float:
    """Return the seconds between the last committed rollouts and the last committed scores. The run spends this
    time waiting for rewards only."""
    last = [
        max((datetime.fromisoformat(m.provenance.created) for m in manifests), default=None)
        for manifests in (scores, rollouts)
    ]
    return max(0.0, (last[0] - last[1]).total_seconds()) if last[0] and last[1] else 0.0


def _environment_seconds(rollouts: Sequence[Manifest]) -> dict[str, float]:
    """Return the time that environments added to generation, in seconds summed over shards: "environment" (waiting
    for environments), "answering" (their responses) and "generating". Empty for runs without environments."""
    seconds_of_shards = [m.provenance.seconds for m in rollouts if "environment" in m.provenance.seconds]
    names = (
        {"environment": "environment", "answering": "answering", "generating": "generate"} if seconds_of_shards else {}
    )
    return {name: sum(seconds.get(key, 0.0) for seconds in seconds_of_shards) for name, key in names.items()}


def retire_policies(open_run: OpenRun, iteration: Iteration) -> int:
    """Delete the model files of policies that the retention settings no longer keep after an iteration. Return the
    number of deleted bundles (folders with model files).

    The first call of a process examines all versions, because a run may be resumed with other retention settings. Later
    calls examine only the version that the iteration made too old, and versions since the oldest reference. The
    version from which an update would start after a restart, and the weights of the references of this and the next
    update, are always kept.
    """
    run, progress, keep = open_run.run, open_run.retention, open_run.settings.retention
    newest = range(max(0, iteration.number + 1 - keep.keep_last), iteration.number + 1)
    old: dict[str, BundleRef] = {}
    for version in range(progress.first_unexamined_version, newest.start):
        bundles = {bundle.key: bundle for bundle in _bundles_of(run, version)}
        if is_kept_at_any_age(version, keep_every=keep.keep_every):
            progress.kept_bundles |= bundles.keys()
        else:
            old |= bundles
    loadable = _loadable_version(run, iteration.number)
    references = _references_of(run, range(loadable + 1, iteration.number + 2))
    used = progress.kept_bundles | {
        bundle.key for version in (*newest, loadable) for bundle in _bundles_of(run, version)
    }
    used |= {weights.key for _, weights in references}
    before = newest_with_state(run, max(0, loadable - 1))
    doubtful_versions = {newest.start - 1, before} - {-1}
    before_reset = _references_of(run, range(max(1, min(loadable, before + 1)), loadable + 1))
    doubtful_versions |= {version for version, _ in before_reset}
    doubtful_keys = {bundle.key for version in doubtful_versions for bundle in _bundles_of(run, version)}
    retired = dict(progress.postponed_bundles)
    for key, bundle in old.items():
        known = run.find(tombstone_key(bundle.digest)) is not None
        # the last deletion may have been interrupted
        if key not in used and (not known or key in doubtful_keys):
            retired[key] = bundle
    progress.postponed_bundles = {bundle.key: bundle for bundle in retire_bundles(run, retired.values())}
    progress.first_unexamined_version = min(newest.start, loadable, *(version for version, _ in references))
    return len(retired) - len(progress.postponed_bundles)


def _references_of(run: Run, iterations: range) -> list[tuple[int, BundleRef]]:
    """Return the references of these iterations: the version whose policy or moving average is the reference, and its
    weights. The initial policy is always kept, so it is not included."""
    rules = {number: recorded_rule(run, number) for number in iterations}
    return [
        (version, select_reference(policy_after(run, version), rule).weights)
        for number, rule in rules.items()
        if (version := reference_iteration(run, number, rule))
    ]


def retire_rollouts(open_run: OpenRun, iteration: Iteration) -> None:
    """Delete all shards of the iterations that are too old for the retention settings after this iteration.

    Rollouts are kept if an update may have to be repeated with them, or if a kept iteration continues their
    completions. Raises Damaged if the seal that lists the continued groups is missing.
    """
    run, progress, keep = open_run.run, open_run.retention, open_run.settings.retention.rollouts_keep_last
    if not keep:
        return
    loadable = _loadable_version(run, iteration.number)
    last = min(iteration.number - keep, loadable)
    while last > 0 and _is_continued(run, last):
        last -= 1
    if not progress.last_deleted_iteration:  # the last deletion of an earlier process may have been interrupted
        progress.last_deleted_iteration = max(iteration_numbers(deleted_parts(run)), default=1) - 1
    for number in range(progress.last_deleted_iteration + 1, last + 1):
        _retire_shards(run, number)
    progress.last_deleted_iteration = max(progress.last_deleted_iteration, last)


def _is_continued(run: Run, number: int) -> bool:
    """Return whether the next iteration continues completions of this completed iteration."""
    run.require(StageKey.of(iteration_key(number), "seal"))
    return bool(carry_over_before(run, number + 1).rows())


def _retire_shards(run: Run, number: int) -> None:
    """Delete the rollout, score and sample shards of an iteration, and record the deletion in a tombstone.
    Iterations never share a shard."""
    derived = [DerivedResult(line.kind, line.name) for line in list_derived_results(run)]
    keys = [iteration_key(number), *(each.iteration_key(number) for each in derived)]
    below = tuple(f"{key}/" for key in keys)
    write_tombstone(run, iteration_key(number), Deleted(why="retention.rollouts_keep_last", shards_below=below))
    manifests = [manifest for prefix in below for manifest in run.manifests(prefix)]
    delete_all(run, sorted({shard.key for manifest in manifests for shard in manifest.shards} - objects_of_forks(run)))


def retire_bundles(run: Run, bundles: Collection[BundleRef]) -> list[BundleRef]:
    """Delete the files of policies, critics and optimizer states (bundles), and record the deletion in tombstones.
    Return the bundles whose files are kept for now, because a live process reads them. Files that a fork
    shares are kept as well, but not returned.

    The files of the kept bundles stay until a later call or `rheostat gc` deletes them. If a call was interrupted, the
    next call finishes its work.
    """
    for bundle in bundles:
        write_tombstone(run, bundle.digest[:16], Deleted(bundle=bundle.key))
    in_use = bundles_in_use(run.store) if bundles else frozenset()
    shared = objects_of_forks(run) if bundles else frozenset()
    kept = [bundle for bundle in bundles if bundle.digest[:16] in in_use]
    for bundle in bundles:
        if bundle not in kept and f"{bundle.key}/{CONTENTS}" not in shared:
            delete_bundle(run.store, bundle)
    return kept


def is_kept_at_any_age(version: int, *, keep_every: int) -> bool:
    """Return whether the files of a version are kept forever, which holds for version 0 and every `keep_every`-th
    version."""
    return version == 0 or (keep_every > 0 and version % keep_every == 0)


def _loadable_version(run: Run, number: int) -> int:
    """Return the version from which the next update may have to start if no rank has the optimizer state in memory.

    Unless the iteration was reverted, its optimizer state may not be stored yet when the next update is requested.
    """
    return updates_since_state(run, number if has_reverted(run, number) else number - 1)[0]


def _bundles_of(run: Run, version: int) -> list[BundleRef]:
    """Return references to the stored files of a policy version and its critic. After a revert, the files of the
    policy that replaced this version are included.

    The initial critic has a separate manifest. Raises Damaged if the policy in the iteration's seal is a different one.
    """
    first_critic = run.find(StageKey.critic(0)) if version == 0 else None
    replacement = policy_after(run, version)
    if version and "alarms" in run.record.config:
        sealed = run.require(StageKey.of(iteration_key(version), "seal")).detail.get("policy")
        if sealed not in (None, policy_of(replacement).digest):
            raise Damaged(
                f"run {run.name!r}: the end record of iteration {version} names policy {sealed}, but the newest "
                f"manifest of this policy, {replacement.key!r}, has another one. A manifest must be missing, so no "
                "policy is deleted. Restore the missing manifest from a copy of the run."
            )
    manifests = [run.require(StageKey.policy(version)), replacement]
    manifests += [] if first_critic is None else [first_critic]
    return [bundle for manifest in manifests for bundle in manifest.bundles.values()]
