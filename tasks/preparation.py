"""The initial policy and the prompts: made once per run."""

import logging

from prefect import task

from infra.manifests import Manifest
from models.work import PolicyWork, PromptWork, WarmupWork
from tasks.plan import PROMPTS, policy_key
from tasks.session import RunRef, session_of
from tasks.stages import is_transient, once, record, required
from tasks.versions import policy_of

logger = logging.getLogger(__name__)


@task(task_run_name="initial policy", retries=2, retry_condition_fn=is_transient)
async def make_policy(run: RunRef) -> Manifest:
    """Build or import the policy that everything starts from."""
    session = session_of(run)
    settings = session.settings
    work = PolicyWork(policy=settings.policy, data=settings.data, seed=settings.seed)
    return await once(run, "policy/base", role="preparation", method="make_policy", work=work)


@task(task_run_name="warm-up", retries=2, retry_condition_fn=is_transient)
async def warm_up(run: RunRef) -> Manifest:
    """Commit version 0: the base policy, after its supervised warm-up where one is configured."""
    settings = session_of(run).settings
    base = required(run, "policy/base")
    if settings.warmup is None:
        return record(run, policy_key(0), parents=[base], bundles=base.bundles, detail={"version": 0})
    work = WarmupWork(policy=policy_of(base), data=settings.data, warmup=settings.warmup, seed=settings.seed)
    logger.info("warm-up: %d steps of %d examples", settings.warmup.steps, settings.warmup.batch_size)
    warm = await once(run, policy_key(0), role="update", method="warmup", work=work, parents=[base])
    logger.info("warm-up: loss %.3f after %.0f s", warm.metrics["loss_last"], warm.provenance.seconds["stage"])
    return warm


@task(task_run_name="prompts {split}", retries=2, retry_condition_fn=is_transient)
async def make_prompts(run: RunRef, split: str) -> Manifest:
    """Render and tokenize one split of the data."""
    settings = session_of(run).settings
    base = required(run, "policy/base")
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
    if session.run.find(policy_key(session.settings.iterations)) is None:
        session.warm("update", "scoring")
        session.warm_slots()


async def release_preparation(run: RunRef) -> None:
    """End the preparation worker: nothing later needs it."""
    await session_of(run).release("preparation")
