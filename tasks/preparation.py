"""What every run has first: checked inputs, the initial policy and the tokenized prompts, each made once per run.

The check is a task, so that a run started from anywhere else than the command line is checked too.
"""

from prefect import task
from pydantic import BaseModel

from infra.store.manifests import Manifest
from models.records.work import PolicyWork, PromptWork
from tasks.run.keys import BASE, PROMPTS, StageKey
from tasks.run.session import RunRef, session_of
from tasks.run.stages import is_transient, once, required
from tasks.run.subprocesses import preflight
from tasks.run.versions import policy_of


@task(task_run_name="initial policy", retries=2, retry_condition_fn=is_transient)
async def make_policy(run: RunRef) -> Manifest:
    """Build or import the policy that everything starts from."""
    session = session_of(run)
    settings = session.settings
    work = PolicyWork(policy=settings.policy, data=settings.data, seed=settings.seed)
    return await once(run, BASE, role="preparation", method="make_policy", work=work)


@task(task_run_name="prompts {split}", retries=2, retry_condition_fn=is_transient)
async def make_prompts(run: RunRef, split: str) -> Manifest:
    """Render and tokenize one split of the data."""
    settings = session_of(run).settings
    base = required(run, BASE)
    work = PromptWork(
        data=settings.data,
        split=split,
        policy=policy_of(base),
        seed=settings.seed,
        max_new_tokens=settings.rollout.sampling.max_new_tokens,
    )
    return await once(run, PROMPTS[split], role="preparation", method="make_prompts", work=work, parents=[base])


def start_pools(run: RunRef) -> None:
    """Let the workers that stages will ask for start side by side; a finished run needs none."""
    session = session_of(run)
    if session.run.find(PROMPTS["heldout"]) is None:
        session.warm("preparation")
    if session.run.find(StageKey.policy(session.settings.iterations)) is None:
        session.warm("update", "scoring")
        session.warm_slots()


async def release_preparation(run: RunRef) -> None:
    """End the preparation worker: nothing later needs it."""
    await session_of(run).release("preparation")


@task(task_run_name="check inputs")
async def check_inputs(config: BaseModel) -> dict[str, float]:
    """Return what the check found out (sizes and memory estimates). Raises BadInput in one line."""
    return await preflight(config)


async def begin(run: RunRef) -> None:
    """Make the policy, and both splits of the prompts."""
    await make_policy(run)
    await make_prompts(run, "train")
    await make_prompts(run, "heldout")
