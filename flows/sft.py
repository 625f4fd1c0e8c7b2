"""Supervised fine-tuning: the policy imitates worked examples."""

from prefect import flow

from flows.beginning import begin
from flows.config import RunConfig
from flows.measuring import measured
from flows.running import hold
from flows.scopes import measured_by_rules, require_part
from tasks.offline import fine_tune
from tasks.offline_reports import TrainedPolicy, report_policy
from tasks.plan import BASE, SFT
from tasks.session import RunRef


@flow(name="fine-tuning", flow_run_name="fine-tuning")
async def fine_tuning(run: RunRef) -> None:
    """Train the policy that was made on worked examples."""
    await fine_tune(run)


@flow(name="sft", flow_run_name="{config.name}", persist_result=True, result_serializer="json")
async def sft(config: RunConfig) -> TrainedPolicy:
    """Go as far as the policy after its supervised warm-up, and measure it on held-out problems."""
    require_part("sft", config)
    async with hold(config, scope=measured_by_rules(config)) as run:
        await begin(run)
        before = await measured(run, BASE)
        await fine_tuning(run)
        after = await measured(run, SFT)
        return await report_policy(run, SFT, before, after)
