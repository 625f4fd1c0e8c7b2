"""Where a run begins: an initial policy, its supervised warm-up, and the tokenized prompts."""

from prefect import flow

from tasks.preparation import make_policy, make_prompts, release_preparation, warm_up
from tasks.session import RunRef


@flow(name="warmup", flow_run_name="warm-up")
async def warmup(run: RunRef) -> None:
    """Make version 0 of the policy and both splits of the prompts."""
    await make_policy(run)
    await make_prompts(run, "train")
    await make_prompts(run, "heldout")
    await warm_up(run)
    await release_preparation(run)
