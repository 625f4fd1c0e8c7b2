"""Where a run begins: an initial policy, its supervised warm-up, the prompts, the judges, a critic and a teacher."""

from prefect import flow

from tasks.critic import has_critic, make_critic
from tasks.judges import local_terms, make_judge, train_judge
from tasks.preparation import make_policy, make_prompts, release_preparation, warm_up
from tasks.session import RunRef
from tasks.teacher import holds_teacher, make_teacher


@flow(name="warmup", flow_run_name="warm-up")
async def warmup(run: RunRef) -> None:
    """Make version 0 of the policy, both splits of the prompts, and the models that judge, value or teach."""
    await make_policy(run)
    await make_prompts(run, "train")
    await make_prompts(run, "heldout")
    for term in local_terms(run):
        await make_judge(run, term)
        await train_judge(run, term)
    if holds_teacher(run):
        await make_teacher(run)
    await warm_up(run)
    if has_critic(run):
        await make_critic(run)
    await release_preparation(run)
