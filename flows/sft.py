"""Flow for supervised fine-tuning: the policy is trained on worked examples."""

from prefect import flow

from flows.endings import install_state_handling
from flows.measurement import measure_policy
from flows.preparation import fine_tuning
from flows.session import hold
from tasks.config.run import RunConfig, require_part, with_rule_rewards_only
from tasks.preparation import begin
from tasks.reporting import TrainedPolicy, report_policy
from tasks.run.keys import BASE, SFT


@flow(name="sft", flow_run_name="{config.name}", persist_result=True, result_serializer="json")
async def sft(config: RunConfig, accept_change: bool = False) -> TrainedPolicy:
    """Run the job up to the end of supervised warm-up, and evaluate the policy on held-out problems.

    Args:
        config: Configuration of the run.
        accept_change: Resume even if reward code, data files or library versions have changed.
    """
    install_state_handling()
    require_part("sft", config)
    async with hold(config, scope=with_rule_rewards_only(config), accept_change=accept_change) as session:
        await begin(session)
        before = await measure_policy(session, BASE)
        await fine_tuning(session.ref)
        after = await measure_policy(session, SFT)
        return await report_policy(session, SFT, before, after)
