"""The manifest that makes an iteration exist, and the retirement of policies that nothing needs any more."""

from datetime import UTC, datetime

from prefect import task

from infra.manifests import Manifest
from infra.retention import retire_bundle
from tasks.plan import BatchPlan, plan_key, policy_key
from tasks.session import RunRef, session_of
from tasks.stages import record, required


@task(task_run_name="{plan.key} seal")
async def seal_iteration(run: RunRef, plan: BatchPlan) -> Manifest:
    """Commit the list of everything that the iteration made, with its metrics."""
    placed = required(run, plan_key(plan.key))
    shards = range(len(plan.shards))
    rollouts = [required(run, plan.shard_key("rollout", shard)) for shard in shards]
    scores = [required(run, plan.shard_key("scoring", shard)) for shard in shards]
    credit, update = required(run, f"{plan.key}/credit"), required(run, policy_key(plan.number))
    elapsed = datetime.now(UTC) - datetime.fromisoformat(placed.provenance.created)
    seconds = {
        "rollout": max(m.provenance.seconds["stage"] for m in rollouts),
        "scoring": sum(m.provenance.seconds["worker"] for m in scores),
        "credit": credit.provenance.seconds["stage"],
        "update": update.provenance.seconds["stage"],
        "total": elapsed.total_seconds(),
    }
    return record(
        run,
        f"{plan.key}/seal",
        parents=[placed, *rollouts, *scores, credit, update],
        metrics={
            "prompts": len(plan.rows),
            **{f"credit/{name}": value for name, value in credit.metrics.items()},
            **{f"update/{name}": value for name, value in update.metrics.items()},
        },
        detail={"policy": update.bundles["weights"].digest},
        seconds=seconds,
    )


@task(task_run_name="{plan.key} retire")
async def retire_policies(run: RunRef, plan: BatchPlan) -> int:
    """Delete the files of policies that retention no longer keeps; return how many bundles went."""
    session = session_of(run)
    keep = session.settings.retention
    versions = range(plan.number + 1)
    kept = {v for v in versions if v == 0 or v > plan.number - keep.keep_last or _every(v, keep.keep_every)}
    candidate = plan.number - keep.keep_last
    if candidate < 0 or candidate in kept:
        return 0
    still_used = {ref.key for v in kept for ref in required(run, policy_key(v)).bundles.values()}
    retired = [ref for ref in required(run, policy_key(candidate)).bundles.values() if ref.key not in still_used]
    for bundle in retired:
        retire_bundle(session.run, bundle)
    return len(retired)


def _every(version: int, keep_every: int) -> bool:
    return keep_every > 0 and version % keep_every == 0
