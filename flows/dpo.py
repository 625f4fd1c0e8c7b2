"""Flow for direct preference optimization: the policy is trained on pairs of completions, without a reward model."""

from prefect import flow

from rheostat.flows.measurement import measure_policy
from rheostat.flows.prefect_states import install_state_handling
from rheostat.flows.preparation import run_fine_tuning, run_preference_training
from rheostat.flows.run_access import lock_run
from rheostat.tasks.config.run import RunConfig, require_part, with_rule_rewards_only
from rheostat.tasks.preparation import prepare_policy_and_prompts, uses_fine_tuning
from rheostat.tasks.run.keys import BASE, DPO, SFT
from rheostat.tasks.training_report import TrainedPolicy, report_policy


@flow(name="dpo", flow_run_name="{config.name}", persist_result=True, result_serializer="json")
async def dpo(config: RunConfig, accept_change: bool = False) -> TrainedPolicy:
    """Run the job up to the end of preference optimization, and evaluate the policy on held-out problems.

    Args:
        config: Configuration of the run.
        accept_change: Resume even if reward code, data files or library versions have changed.
    """
    install_state_handling()
    require_part("dpo", config)
    async with lock_run(config, scope=with_rule_rewards_only(config), accept_change=accept_change) as open_run:
        await prepare_policy_and_prompts(open_run)
        if uses_fine_tuning(open_run):
            await run_fine_tuning(open_run.ref)
        before = await measure_policy(open_run, SFT if uses_fine_tuning(open_run) else BASE)
        await run_preference_training(open_run.ref)
        after = await measure_policy(open_run, DPO)
        return await report_policy(open_run, DPO, before, after)
