"""The optimizer steps of an iteration: one task, all ranks."""

from prefect import task

from infra.store.manifests import Manifest
from models.config.algorithms import Ppo
from models.records.work import UpdateWork
from tasks.kl import loss_coefficient
from tasks.plan import BatchPlan, credit_key, critic_key, policy_key
from tasks.session import RunRef, session_of
from tasks.stages import is_transient, once, required
from tasks.versions import critic_of, policy_of


@task(task_run_name="{plan.key} update", retries=2, retry_condition_fn=is_transient)
async def update_policy(run: RunRef, plan: BatchPlan) -> Manifest:
    """Have the update ranks learn from the iteration's samples and commit the new policy version."""
    settings = session_of(run).settings
    algorithm = settings.algorithm
    critic = algorithm.critic if isinstance(algorithm, Ppo) else None
    parent, credit = required(run, plan.policy), required(run, credit_key(plan.number))
    work = UpdateWork(
        iteration=plan.number,
        policy=policy_of(parent),
        reference=policy_of(required(run, policy_key(0))),
        samples=credit.shards,
        total_iterations=settings.iterations,
        seed=settings.seed,
        critic=None if critic is None else critic_of(required(run, critic_key(plan.number - 1))),
        learns=critic is None or plan.number > critic.warmup_iterations,
        kl_coefficient=loss_coefficient(run, plan.number),
    )
    return await once(run, policy_key(plan.number), role="update", method="update", work=work, parents=[parent, credit])
