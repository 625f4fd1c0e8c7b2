"""What models say of every token of an iteration's rollouts before credit: one task, all update ranks.

The models that are asked are made once: the first critic where the algorithm has one; a teacher is copied into the run,
unless it is behind an endpoint.
"""

from prefect import task

from infra.store.manifests import Manifest
from models.algorithms.advantages import required_models
from models.config.algorithms import TeacherDirectory
from models.records.work import CriticWork, EstimateWork, TeacherWork
from tasks.config.run import RunConfig
from tasks.credit import scored_shards
from tasks.run.keys import BASE, PROMPTS, TEACHER, StageKey, iteration_key
from tasks.run.session import RunRef, session_of
from tasks.run.stages import is_transient, once, required
from tasks.run.versions import critic_of, policy_of


def held_teacher(settings: RunConfig) -> TeacherDirectory | None:
    """The teacher whose model the run holds; none without a teacher, or with one behind an endpoint."""
    distillation = settings.algorithm.distillation
    teacher = None if distillation is None else distillation.teacher
    return teacher if teacher is not None and teacher.kind == "directory" else None


def holds_teacher(run: RunRef) -> bool:
    """Whether the run holds a teacher's model."""
    return held_teacher(session_of(run).settings) is not None


@task(task_run_name="teacher", retries=2, retry_condition_fn=is_transient)
async def make_teacher(run: RunRef) -> Manifest:
    """Copy the teacher's model, which must know the policy's tokens."""
    settings = session_of(run).settings
    teacher = held_teacher(settings)
    assert teacher is not None, "make_teacher where holds_teacher"
    base, prompts = required(run, BASE), required(run, PROMPTS["train"])
    longest = int(prompts.metrics["longest"]) + settings.rollout.sampling.max_new_tokens
    work = TeacherWork(teacher=teacher, policy=policy_of(base), longest_tokens=longest)
    return await once(run, TEACHER, role="preparation", method="make_teacher", work=work, parents=[base, prompts])


async def estimate(run: RunRef, number: int) -> None:
    """Ask the models whose opinion credit needs; most algorithms need none."""
    if required_models(session_of(run).settings.algorithm).any:
        await estimate_tokens(run, number)


@task(task_run_name="it-{number:04d} estimates", retries=2, retry_condition_fn=is_transient)
async def estimate_tokens(run: RunRef, number: int) -> Manifest:
    """Have the update ranks estimate every token that credit will look at, those of kept groups too."""
    needs = required_models(session_of(run).settings.algorithm)
    scored, policy = scored_shards(run, number), required(run, StageKey.policy(number - 1))
    reference = required(run, StageKey.policy(0)) if needs.reference else None
    critic = required(run, StageKey.critic(number - 1)) if needs.critic else None
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
    return await once(
        run,
        StageKey.of(iteration_key(number), "estimates"),
        role="update",
        method="estimate",
        work=work,
        parents=parents,
    )


def has_critic(run: RunRef) -> bool:
    """Whether the run trains a critic beside its policy."""
    settings = session_of(run).settings
    return settings.algorithm.value_model is not None and settings.iterations > 0


@task(task_run_name="initial critic", retries=2, retry_condition_fn=is_transient)
async def make_critic(run: RunRef) -> Manifest:
    """Build the critic from the initial policy, or import the one that is configured."""
    critic = session_of(run).settings.algorithm.value_model
    assert critic is not None, "make_critic where has_critic"
    policy = required(run, StageKey.policy(0))
    work = CriticWork(policy=policy_of(policy), critic=critic)
    return await once(run, StageKey.critic(0), role="preparation", method="make_critic", work=work, parents=[policy])
