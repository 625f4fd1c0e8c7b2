"""Flow for supervised fine-tuning: the policy is trained on worked examples."""

from prefect import flow

from rheostat.flows.measurement import measure_policy
from rheostat.flows.prefect_states import install_state_handling
from rheostat.flows.preparation import run_fine_tuning
from rheostat.flows.run_access import lock_run
from rheostat.tasks.config.run import RunConfig, require_part, with_rule_rewards_only
from rheostat.tasks.preparation import prepare_policy_and_prompts
from rheostat.tasks.run.keys import BASE, SFT
from rheostat.tasks.training_report import TrainedPolicy, report_policy


@flow(name="sft", flow_run_name="{config.name}", persist_result=True, result_serializer="json")
async def sft(config: RunConfig, accept_change: bool = False) -> TrainedPolicy:
    """Run the job up to the end of supervised fine-tuning (the warm-up), and evaluate the policy on held-out problems.

    Args:
        config: Configuration of the run.
        accept_change: Resume even if reward code, data files or library versions have changed.
    """
    install_state_handling()
    require_part("sft", config)
    async with lock_run(config, scope=with_rule_rewards_only(config), accept_change=accept_change) as open_run:
        await prepare_policy_and_prompts(open_run)
        before = await measure_policy(open_run, BASE)
        await run_fine_tuning(open_run.ref)
        after = await measure_policy(open_run, SFT)
        return await report_policy(open_run, SFT, before, after)
