"""Where a run begins: a policy and its first training, the prompts, and the models that judge, value or teach."""

from prefect import flow

from flows.beginning import begin
from flows.dpo import preference_learning
from flows.reward_modelling import reward_modelling
from flows.sft import fine_tuning
from tasks.critic import has_critic, make_critic
from tasks.judges import local_terms
from tasks.offline import begin_with, is_fine_tuned, is_preferring
from tasks.preparation import release_preparation
from tasks.session import RunRef
from tasks.teacher import holds_teacher, make_teacher


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
