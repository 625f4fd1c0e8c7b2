"""Preparation of a run before the first iteration: initial policy with its supervised training, prompts, and other
models."""

from prefect import flow

from rheostat.flows.preparation import run_fine_tuning, run_preference_training, train_reward_models
from rheostat.tasks.auxiliary import find_stored_teachers, has_critic, make_critic, make_teacher
from rheostat.tasks.preparation import (
    commit_initial_policy,
    prepare_policy_and_prompts,
    release_preparation,
    uses_fine_tuning,
    uses_preference_training,
)
from rheostat.tasks.run.open_run import RunRef, get_open_run


@flow(name="warmup", flow_run_name="warm-up")
async def prepare_run(run: RunRef) -> None:
    """Create everything that the first iteration needs: version 0 of the policy, the prompts and, if they are
    configured, the reward models, the teachers and the critic."""
    open_run = get_open_run(run)
    await prepare_policy_and_prompts(open_run)
    if uses_fine_tuning(open_run):
        await run_fine_tuning(run)
    if uses_preference_training(open_run):
        await run_preference_training(run)
    policy = await commit_initial_policy(open_run)
    if open_run.settings.scoring.hosted_rewards:
        await train_reward_models(run)
    for index in find_stored_teachers(open_run.settings):
        await make_teacher(open_run, index)
    if has_critic(open_run):
        await make_critic(open_run, policy)
    await release_preparation(open_run)
