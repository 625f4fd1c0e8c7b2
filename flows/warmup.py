"""Preparation of a run: the initial policy and its supervised training, the prompts, and the models for rewards and
credit."""

from prefect import flow

from flows.preparation import run_fine_tuning, run_preference_training, train_reward_models
from tasks.auxiliary import has_critic, holds_teacher, make_critic, make_teacher
from tasks.preparation import begin, begin_with, is_fine_tuned, is_preferring, release_preparation
from tasks.run.open_run import RunRef, get_open_run


@flow(name="warmup", flow_run_name="warm-up")
async def prepare_run(run: RunRef) -> None:
    """Create version 0 of the policy, both splits of the prompts, the reward models, the teacher and the critic."""
    open_run = get_open_run(run)
    await begin(open_run)
    if is_fine_tuned(open_run):
        await run_fine_tuning(run)
    if is_preferring(open_run):
        await run_preference_training(run)
    policy = await begin_with(open_run)
    if open_run.settings.scoring.hosted_rewards:
        await train_reward_models(run)
    if holds_teacher(open_run):
        await make_teacher(open_run)
    if has_critic(open_run):
        await make_critic(open_run, policy)
    await release_preparation(open_run)
