"""Preparation of a run: the initial policy and its supervised training, the prompts, and the models for rewards and
credit."""

from prefect import flow

from flows.preparation import fine_tuning, preference_learning, reward_modelling
from tasks.auxiliary import has_critic, holds_teacher, make_critic, make_teacher
from tasks.preparation import begin, begin_with, is_fine_tuned, is_preferring, release_preparation
from tasks.run.session import RunRef, session_of


@flow(name="warmup", flow_run_name="warm-up")
async def warmup(run: RunRef) -> None:
    """Create version 0 of the policy, both splits of the prompts, the reward models, the teacher and the critic."""
    session = session_of(run)
    await begin(session)
    if is_fine_tuned(session):
        await fine_tuning(run)
    if is_preferring(session):
        await preference_learning(run)
    policy = await begin_with(session)
    if session.settings.scoring.hosted_rewards:
        await reward_modelling(run)
    if holds_teacher(session):
        await make_teacher(session)
    if has_critic(session):
        await make_critic(session, policy)
    await release_preparation(session)
