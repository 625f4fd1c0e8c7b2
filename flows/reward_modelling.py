"""Reward modelling: the models behind served rewards, built, copied, or trained on the run's own data."""

from prefect import flow

from flows.dpo import preference_learning
from flows.session import hold
from flows.sft import fine_tuning
from tasks.config.run import RunConfig, require_part
from tasks.preparation import begin, begin_with, is_fine_tuned, is_preferring, make_reward_model, train_reward_model
from tasks.reporting import TrainedRewards, report_rewards
from tasks.run.session import RunRef, session_of


@flow(name="reward-modelling", flow_run_name="reward modelling")
async def reward_modelling(run: RunRef) -> None:
    """Make and train every model that scores completions here."""
    session = session_of(run)
    for term in session.settings.scoring.hosted_rewards:
        made = await make_reward_model(session, term)
        await train_reward_model(session, term, made)


@flow(name="reward-model", flow_run_name="{config.name}", persist_result=True, result_serializer="json")
async def reward_model(config: RunConfig, accept_change: bool = False) -> TrainedRewards:
    """Go as far as the models behind rewards, and report how they judge held-out pairs.

    Args:
        config: The run.
        accept_change: Go on although code of targets, data files or libraries are not those of the run.
    """
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
