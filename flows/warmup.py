"""Where a run begins: a policy and its first training, the prompts, and the models that judge, value or teach."""

from prefect import flow

from flows.dpo import preference_learning
from flows.reward_modelling import reward_modelling
from flows.sft import fine_tuning
from tasks.auxiliary import has_critic, holds_teacher, make_critic, make_teacher
from tasks.offline_training import begin_with, is_fine_tuned, is_preferring, local_terms
from tasks.preparation import begin, release_preparation
from tasks.run.session import RunRef


@flow(name="warmup", flow_run_name="warm-up")
async def warmup(run: RunRef) -> None:
    """Make version 0 of the policy, both splits of the prompts, and the models that judge, value or teach."""
    await begin(run)
    if is_fine_tuned(run):
        await fine_tuning(run)
    if is_preferring(run):
        await preference_learning(run)
    await begin_with(run)
    if local_terms(run):
        await reward_modelling(run)
    if holds_teacher(run):
        await make_teacher(run)
    if has_critic(run):
        await make_critic(run)
    await release_preparation(run)
