"""What every run has first: a policy as it is made, and the tokenized prompts."""

from tasks.preparation import make_policy, make_prompts
from tasks.session import RunRef


async def begin(run: RunRef) -> None:
    """Make the policy, and both splits of the prompts."""
    await make_policy(run)
    await make_prompts(run, "train")
    await make_prompts(run, "heldout")
