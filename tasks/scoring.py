"""Rewards, one task per shard, and credit, one task per iteration."""

from prefect import task

from infra.manifests import Manifest
from models.work import CreditWork, ScoringWork
from tasks.plan import BatchPlan
from tasks.session import RunRef
from tasks.stages import committed, is_transient, once, required


@task(task_run_name="{plan.key} score {shard:04d}", retries=2, retry_condition_fn=is_transient)
async def score_shard(run: RunRef, plan: BatchPlan, shard: int, silence_seconds: float) -> Manifest:
    """Wait for one rollout shard's commit, have a scoring worker score it, commit the scores."""
    rollouts = await committed(run, plan.shard_key("rollout", shard), silence_seconds=silence_seconds)
    work = ScoringWork(iteration=plan.number, rollouts=rollouts.shards[0])
    key = plan.shard_key("scoring", shard)
    return await once(run, key, role="scoring", method="score", work=work, parents=[rollouts])


@task(task_run_name="{plan.key} credit", retries=2, retry_condition_fn=is_transient)
async def assign_credit(run: RunRef, plan: BatchPlan) -> Manifest:
    """Turn the iteration's rewards into training samples."""
    rollouts = [required(run, plan.shard_key("rollout", shard)) for shard in range(len(plan.shards))]
    scores = [required(run, plan.shard_key("scoring", shard)) for shard in range(len(plan.shards))]
    work = CreditWork(
        iteration=plan.number,
        rollouts=tuple(manifest.shards[0] for manifest in rollouts),
        scores=tuple(manifest.shards[0] for manifest in scores),
    )
    key = f"{plan.key}/credit"
    return await once(run, key, role="scoring", method="credit", work=work, parents=[*rollouts, *scores])
