"""Seal of an iteration (the manifest that completes it), and retention: the deletion of policies and rollouts that are
no longer needed."""

from collections.abc import Collection, Sequence
from datetime import UTC, datetime

from infra.errors import Damaged
from infra.store.bundles import BundleRef, delete_bundle
from infra.store.garbage import delete_all
from infra.store.manifests import Manifest
from infra.store.readers import bundles_in_use
from infra.store.runs import Run
from infra.store.shards import tombstone_key
from infra.store.tombstones import Deleted, bury, deleted_parts
from models.records.versions import policy_of
from tasks.alarms import raised_alarms
from tasks.auxiliary import auxiliary_of
from tasks.costs import Held, iteration_costs
from tasks.run.iteration import Iteration, carry_over_after, carry_over_before
from tasks.run.keys import StageKey, iteration_key, iterations_among
from tasks.run.rescorings import Derived, derived_of
from tasks.run.returns import has_returned, policy_after
from tasks.run.session import Session
from tasks.run.stages import decided_here, finish, record
from tasks.run.states import newest_with_state, way_to


def seal_iteration(session: Session, iteration: Iteration) -> Manifest:
    """Commit the seal of an iteration: the list of its manifests, its metrics, and the state passed on to the next
    iteration."""
    plans = [batch.planned for batch in iteration.batches]
    rollouts, scores = iteration.stage("rollout"), iteration.stage("scoring")
    auxiliary, credit, update = auxiliary_of(session, iteration), iteration.credit, iteration.update
    elapsed = datetime.now(UTC) - datetime.fromisoformat(plans[0].provenance.created)
    seconds = {
        "rollout": max((m.provenance.seconds["stage"] for m in rollouts), default=0.0),
        "scoring": sum(m.provenance.seconds["worker"] for m in scores),
        "scoring_after": _later(scores, rollouts),
        "estimates": sum(m.provenance.seconds["stage"] for m in auxiliary),
        "credit": credit.provenance.seconds["stage"],
        "update": update.provenance.seconds["stage"],
        "total": elapsed.total_seconds(),
        **{
            name: sum(m.provenance.seconds[name] for m in rollouts)  # summed over workers, which load in parallel
            for name in ("weights_seconds", "weights_bytes")
        },
        **_waited(rollouts),
    }
    costs = session.account.unsealed.pop(iteration.number, None) or iteration_costs(session, iteration, Held())
    # policy of the update, or the policy that an alarm reverted to
    policy = policy_after(session.run, iteration.number)
    sealed = record(
        session,
        iteration.stage_key("seal"),
        parents=[*plans, *rollouts, *scores, *auxiliary, credit, update, *([] if policy == update else [policy])],
        metrics={"prompts": sum(len(batch.plan.rows) for batch in iteration.batches), **iteration.measured},
        detail={
            "policy": policy_of(policy).digest,
            **carry_over_after(iteration, session.settings.rollout.dynamic).detail(),
        },
        provenance=decided_here(
            seconds=seconds, requests=session.requests(), costs=costs, alarms=raised_alarms(session, iteration)
        ),
    )
    finish(session, iteration.key)
    return sealed


def _later(scores: Sequence[Manifest], rollouts: Sequence[Manifest]) -> float:
    """Return the seconds between the last commit of a rollout and the last commit of scores, in which nothing else of
    the iteration runs."""
    last = [
        max((datetime.fromisoformat(m.provenance.created) for m in made), default=None) for made in (scores, rollouts)
    ]
    return max(0.0, (last[0] - last[1]).total_seconds()) if last[0] and last[1] else 0.0


def _waited(rollouts: Sequence[Manifest]) -> dict[str, float]:
    """Return the seconds of generation, of waiting for environments, and of environments' responses, summed over
    shards."""
    told = [m.provenance.seconds for m in rollouts if "environment" in m.provenance.seconds]
    names = {"environment": "environment", "answering": "answering", "generating": "generate"} if told else {}
    return {name: sum(seconds.get(found, 0.0) for seconds in told) for name, found in names.items()}


def retire_policies(session: Session, iteration: Iteration) -> int:
    """Delete the files of policies that retention no longer keeps after an iteration. Return the number of deleted
    bundles.

    A process examines all versions once, because a run may be resumed with other retention settings, and then the
    version that each iteration makes too old. The version that an update would have to start from after a restart is
    kept too.
    """
    run, looked, keep = session.run, session.retention, session.settings.retention
    newest = range(max(0, iteration.number + 1 - keep.keep_last), iteration.number + 1)
    old: dict[str, BundleRef] = {}
    for version in range(looked.versions, newest.start):
        bundles = {bundle.key: bundle for bundle in _bundles(run, version)}
        if is_kept(version, keep_every=keep.keep_every):
            looked.kept |= bundles.keys()
        else:
            old |= bundles
    loadable = _loadable(run, iteration.number)
    used = looked.kept | {bundle.key for version in (*newest, loadable) for bundle in _bundles(run, version)}
    gone = {newest.start - 1, newest_with_state(run, max(0, loadable - 1))} - {-1}
    newest_gone = {bundle.key for version in gone for bundle in _bundles(run, version)}
    retired = dict(looked.postponed)
    for key, bundle in old.items():
        known = run.find(tombstone_key(bundle.digest)) is not None
        # the last deletion may have been interrupted
        if key not in used and (not known or key in newest_gone):
            retired[key] = bundle
    looked.postponed = {bundle.key: bundle for bundle in retire_bundles(run, retired.values())}
    looked.versions = min(newest.start, loadable)
    return len(retired) - len(looked.postponed)


def retire_rollouts(session: Session, iteration: Iteration) -> None:
    """Delete the shards of iterations that retention no longer keeps after an iteration.

    Rollouts that a repeated update may need, and rollouts that a kept iteration continues, are kept. Raises Damaged if
    the seal that lists the continued groups is missing.
    """
    run, looked, keep = session.run, session.retention, session.settings.retention.rollouts_keep_last
    if not keep:
        return
    loadable = _loadable(run, iteration.number)
    last = min(iteration.number - keep, loadable)
    while last > 0 and _leaves_rollouts(run, last):
        last -= 1
    if not looked.iterations:  # the last deletion of an earlier process may have been interrupted
        looked.iterations = max(iterations_among(deleted_parts(run)), default=1) - 1
    for number in range(looked.iterations + 1, last + 1):
        _retire_shards(run, number)
    looked.iterations = max(looked.iterations, last)


def _leaves_rollouts(run: Run, number: int) -> bool:
    """Return whether the iteration after a sealed one continues its rollouts."""
    run.require(StageKey.of(iteration_key(number), "seal"))
    return bool(carry_over_before(run, number + 1).rows())


def _retire_shards(run: Run, number: int) -> None:
    """Write a tombstone for an iteration and delete its shards. A shard names its iteration, so no other iteration
    shares it."""
    derived = [Derived(line.kind, line.name) for line in derived_of(run)]
    keys = [iteration_key(number), *(each.iteration_key(number) for each in derived)]
    below = tuple(f"{key}/" for key in keys)
    bury(run, iteration_key(number), Deleted(why="retention.rollouts_keep_last", shards_below=below))
    made = [manifest for prefix in below for manifest in run.manifests(prefix)]
    delete_all(run, sorted({shard.key for manifest in made for shard in manifest.shards}))


def retire_bundles(run: Run, bundles: Collection[BundleRef]) -> list[BundleRef]:
    """Write tombstones for bundles and delete their files. Return the bundles that are kept because a live process
    reads them.

    The files of these bundles stay until a later call or `rheostat gc`. A second call finishes an interrupted one.
    """
    for bundle in bundles:
        bury(run, bundle.digest[:16], Deleted(bundle=bundle.key))
    in_use = bundles_in_use(run.store) if bundles else frozenset()
    kept = [bundle for bundle in bundles if bundle.digest[:16] in in_use]
    for bundle in bundles:
        if bundle not in kept:
            delete_bundle(run.store, bundle)
    return kept


def is_kept(version: int, *, keep_every: int) -> bool:
    """Return whether a version keeps its files at any age. The initial version does, and every `keep_every`-th."""
    return version == 0 or (keep_every > 0 and version % keep_every == 0)


def _loadable(run: Run, number: int) -> int:
    """Return the version that the next update may have to start from if no rank has the state in memory.

    The update may have been requested before the state of this iteration was stored, unless the iteration was reverted.
    """
    return way_to(run, number if has_returned(run, number) else number - 1)[0]


def _bundles(run: Run, version: int) -> list[BundleRef]:
    """Return the bundles of a policy and its critic, and of the policy that replaced them after an alarm.

    The initial critic has a separate manifest. Raises Damaged if the iteration's seal names another policy.
    """
    first_critic = run.find(StageKey.critic(0)) if version == 0 else None
    replacement = policy_after(run, version)
    if version and "alarms" in run.record.config:
        sealed = run.require(StageKey.of(iteration_key(version), "seal")).detail.get("policy")
        if sealed not in (None, policy_of(replacement).digest):
            raise Damaged(
                f"run {run.name!r}: the seal of iteration {version} names policy {sealed}, but {replacement.key!r} is "
                "the newest manifest about it: one is missing, so no policy is deleted; restore it from a copy"
            )
    manifests = [run.require(StageKey.policy(version)), replacement]
    manifests += [] if first_critic is None else [first_critic]
    return [bundle for manifest in manifests for bundle in manifest.bundles.values()]
