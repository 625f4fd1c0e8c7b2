"""Where a run begins: an initial policy, its supervised warm-up, the tokenized prompts, and the judges."""

from prefect import flow

from tasks.judges import local_terms, make_judge, train_judge
from tasks.preparation import make_policy, make_prompts, release_preparation, warm_up
from tasks.session import RunRef


@flow(name="warmup", flow_run_name="warm-up")
async def warmup(run: RunRef) -> None:
    """Make version 0 of the policy, both splits of the prompts, and the models that judge."""
    await make_policy(run)
    await make_prompts(run, "train")
    await make_prompts(run, "heldout")
    for term in local_terms(run):
        await make_judge(run, term)
        await train_judge(run, term)
    await warm_up(run)
    await release_preparation(run)
