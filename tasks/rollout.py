"""Generation: one task per shard."""

from prefect import task

from infra.store.manifests import Manifest
from models.records.work import RolloutWork
from tasks.run.batch import BatchPlan
from tasks.run.keys import PROMPTS
from tasks.run.session import RunRef, session_of
from tasks.run.stages import is_transient, once, required
from tasks.run.versions import policy_of


@task(task_run_name="{plan.key} generate {shard:04d}", retries=2, retry_condition_fn=is_transient)
async def generate_shard(run: RunRef, plan: BatchPlan, shard: int) -> Manifest:
    """Have a rollout worker complete one shard's prompts and commit what it wrote."""
    policy = required(run, plan.policy)
    prompts = required(run, PROMPTS[plan.split])
    settings = session_of(run).settings
    carried = [required(run, plan.carried[shard])] if shard < len(plan.carried) else []
    work = RolloutWork(
        iteration=plan.number,
        policy=policy_of(policy),
        prompts=prompts.shards[0],
        rows=plan.shard_rows(shard),
        group_size=plan.group_size,
        sampling=plan.sampling,
        seed=settings.seed,
        continued=carried[0].shards[1] if carried else None,
        partial=settings.rollout.partial if plan.split == "train" else None,
    )
    key = plan.shard_key("rollout", shard)
    return await once(run, key, role="rollout", method="generate", work=work, parents=[policy, prompts, *carried])
