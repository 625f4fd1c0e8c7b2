"""Flow for reward modeling: the models behind rewards are built, copied, or trained on the run's own data."""

from prefect import flow

from rheostat.flows.prefect_states import install_state_handling
from rheostat.flows.preparation import run_fine_tuning, run_preference_training, train_reward_models
from rheostat.flows.run_access import lock_run
from rheostat.tasks.config.run import RunConfig, require_part
from rheostat.tasks.preparation import (
    commit_initial_policy,
    prepare_policy_and_prompts,
    uses_fine_tuning,
    uses_preference_training,
)
from rheostat.tasks.training_report import TrainedRewards, report_rewards


@flow(name="reward-model", flow_run_name="{config.name}", persist_result=True, result_serializer="json")
async def reward_model(config: RunConfig, accept_change: bool = False) -> TrainedRewards:
    """Run the job up to its reward models, and report their accuracy on held-out pairs or held-out steps.

    Args:
        config: Configuration of the run.
        accept_change: Resume even if reward code, data files or library versions have changed.
    """
    install_state_handling()
    require_part("reward-model", config)
    async with lock_run(config, accept_change=accept_change) as open_run:
        await prepare_policy_and_prompts(open_run)
        if uses_fine_tuning(open_run):
            await run_fine_tuning(open_run.ref)
        if uses_preference_training(open_run):
            await run_preference_training(open_run.ref)
        await commit_initial_policy(open_run)
        await train_reward_models(open_run.ref)
        return await report_rewards(open_run)
