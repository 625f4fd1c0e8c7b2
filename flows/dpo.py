"""Flow for direct preference optimization: the policy is trained on pairs of completions, without a reward model."""

from prefect import flow

from flows.endings import install_state_handling
from flows.measurement import measure_policy
from flows.preparation import fine_tuning, preference_learning
from flows.session import hold
from tasks.config.run import RunConfig, require_part, with_rule_rewards_only
from tasks.preparation import begin, is_fine_tuned
from tasks.reporting import TrainedPolicy, report_policy
from tasks.run.keys import BASE, DPO, SFT


@flow(name="dpo", flow_run_name="{config.name}", persist_result=True, result_serializer="json")
async def dpo(config: RunConfig, accept_change: bool = False) -> TrainedPolicy:
    """Run the job up to the end of preference optimization, and evaluate the policy on held-out problems.

    Args:
        config: Configuration of the run.
        accept_change: Resume even if reward code, data files or library versions have changed.
    """
    install_state_handling()
    require_part("dpo", config)
    async with hold(config, scope=with_rule_rewards_only(config), accept_change=accept_change) as session:
        await begin(session)
        if is_fine_tuned(session):
            await fine_tuning(session.ref)
        before = await measure_policy(session, SFT if is_fine_tuned(session) else BASE)
        await preference_learning(session.ref)
        after = await measure_policy(session, DPO)
        return await report_policy(session, DPO, before, after)
