"""What models say of every token of an iteration's rollouts before credit: one task, all update ranks.

The models that are asked are made once: the first critic where the algorithm has one; a teacher is copied into the run,
unless it is behind an endpoint.
"""

from infra.store.manifests import Manifest
from models.algorithms.advantages import required_models
from models.config.teachers import TeacherDirectory
from models.records.versions import critic_of, policy_of
from models.records.work import CriticWork, EstimateWork, TeacherWork
from tasks.config.run import RunConfig
from tasks.run.iteration import Iteration
from tasks.run.keys import BASE, PROMPTS, TEACHER, StageKey
from tasks.run.session import Session
from tasks.run.stages import once, stage


def held_teacher(settings: RunConfig) -> TeacherDirectory | None:
    """The teacher whose model the run holds; none without a teacher, or with one behind an endpoint."""
    distillation = settings.algorithm.distillation
    return None if distillation is None else distillation.teacher.held


def holds_teacher(session: Session) -> bool:
    """Whether the run holds a teacher's model."""
    return held_teacher(session.settings) is not None


@stage("teacher", retries=2)
async def make_teacher(session: Session) -> Manifest:
    """Copy the teacher's model, which must know the policy's tokens."""
    settings = session.settings
    teacher = held_teacher(settings)
    assert teacher is not None, "make_teacher where holds_teacher"
    base, prompts = session.run.require(BASE), session.run.require(PROMPTS["train"])
    longest = int(prompts.metrics["longest"]) + settings.rollout.sampling.max_new_tokens
    pixels = session.settings.data.pixels
    work = TeacherWork(teacher=teacher, policy=policy_of(base), longest_tokens=longest, pixels=pixels)
    return await once(session, TEACHER, role="preparation", method="make_teacher", work=work, parents=[base, prompts])


async def estimate(session: Session, iteration: Iteration) -> None:
    """Ask the models whose opinion credit needs; most algorithms need none."""
    if required_models(session.settings.algorithm).any:
        await estimate_tokens(session, iteration)


@stage("{iteration.key} estimates", retries=2)
async def estimate_tokens(session: Session, iteration: Iteration) -> Manifest:
    """Have the update ranks estimate every token that credit will look at, those of leftover groups too."""
    needs, scored, policy = required_models(session.settings.algorithm), iteration.scored(), iteration.policy
    reference = iteration.first_policy if needs.reference else None
    critic = iteration.critic if needs.critic else None
    teacher = session.run.require(TEACHER) if holds_teacher(session) else None
    work = EstimateWork(
        iteration=iteration.number,
        shards=scored.shards,
        media=iteration.media,
        policy=policy_of(policy),
        reference=None if reference is None else policy_of(reference),
        critic=None if critic is None else critic_of(critic),
        teacher=None if teacher is None else policy_of(teacher),
    )
    models = {manifest.key: manifest for manifest in (policy, reference, critic, teacher) if manifest is not None}
    key, parents = iteration.stage_key("estimates"), [*scored.rollouts, *models.values()]
    return await once(session, key, role="update", method="estimate", work=work, parents=parents)


def auxiliary_of(session: Session, iteration: Iteration) -> list[Manifest]:
    """What models have said of the iteration's tokens, where the session's algorithm asks any."""
    return [iteration.made("estimates")] if required_models(session.settings.algorithm).any else []


def has_critic(session: Session) -> bool:
    """Whether the run trains a critic beside its policy."""
    return session.settings.algorithm.value_model is not None and session.settings.iterations > 0


@stage("initial critic", retries=2)
async def make_critic(session: Session, policy: Manifest) -> Manifest:
    """Build the critic from the initial policy, or import the one that is configured."""
    critic = session.settings.algorithm.value_model
    assert critic is not None, "make_critic where has_critic"
    work, key = CriticWork(policy=policy_of(policy), critic=critic), StageKey.critic(0)
    return await once(session, key, role="preparation", method="make_critic", work=work, parents=[policy])
