"""Flow for reward modeling: the models behind rewards are built, copied, or trained on the run's own data."""

from prefect import flow

from flows.endings import install_state_handling
from flows.preparation import fine_tuning, preference_learning, reward_modelling
from flows.session import hold
from tasks.config.run import RunConfig, require_part
from tasks.preparation import begin, begin_with, is_fine_tuned, is_preferring
from tasks.reporting import TrainedRewards, report_rewards


@flow(name="reward-model", flow_run_name="{config.name}", persist_result=True, result_serializer="json")
async def reward_model(config: RunConfig, accept_change: bool = False) -> TrainedRewards:
    """Run the job up to its reward models, and report their accuracy on held-out pairs.

    Args:
        config: Configuration of the run.
        accept_change: Resume even if reward code, data files or library versions have changed.
    """
    install_state_handling()
    require_part("reward-model", config)
    async with hold(config, accept_change=accept_change) as session:
        await begin(session)
        if is_fine_tuned(session):
            await fine_tuning(session.ref)
        if is_preferring(session):
            await preference_learning(session.ref)
        await begin_with(session)
        await reward_modelling(session.ref)
        return await report_rewards(session)
