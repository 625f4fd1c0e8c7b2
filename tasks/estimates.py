"""What models say of every token of an iteration's rollouts: one task, all update ranks, before credit."""

from prefect import task

from infra.store.manifests import Manifest
from models.algorithms.advantages import needs_of
from models.records.work import EstimateWork
from tasks.plan import critic_key, estimates_key, policy_key
from tasks.scoring import scored_shards
from tasks.session import RunRef, session_of
from tasks.stages import is_transient, once, required
from tasks.teacher import TEACHER, holds_teacher
from tasks.versions import critic_of, policy_of


async def estimate(run: RunRef, number: int) -> None:
    """Ask the models whose opinion credit needs; most algorithms need none."""
    if needs_of(session_of(run).settings.algorithm).any:
        await estimate_tokens(run, number)


@task(task_run_name="it-{number:04d} estimates", retries=2, retry_condition_fn=is_transient)
async def estimate_tokens(run: RunRef, number: int) -> Manifest:
    """Have the update ranks estimate every token that credit will look at, those of kept groups too."""
    needs = needs_of(session_of(run).settings.algorithm)
    scored, policy = scored_shards(run, number), required(run, policy_key(number - 1))
    reference = required(run, policy_key(0)) if needs.reference else None
    critic = required(run, critic_key(number - 1)) if needs.critic else None
    teacher = required(run, TEACHER) if holds_teacher(run) else None
    work = EstimateWork(
        iteration=number,
        shards=scored.shards,
        policy=policy_of(policy),
        reference=None if reference is None else policy_of(reference),
        critic=None if critic is None else critic_of(critic),
        teacher=None if teacher is None else policy_of(teacher),
    )
    models = {manifest.key: manifest for manifest in (policy, reference, critic, teacher) if manifest is not None}
    parents = [*scored.rollouts, *models.values()]
    return await once(run, estimates_key(number), role="update", method="estimate", work=work, parents=parents)
