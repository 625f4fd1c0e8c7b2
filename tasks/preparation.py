"""What every run has first: checked inputs, the initial policy and the tokenized prompts, each made once per run.

The check is a task, so that a run started from anywhere else than the command line is checked too.
"""

from pydantic import BaseModel

from infra.store.manifests import Manifest
from models.records.versions import policy_of
from models.records.work import PolicyWork, PromptWork
from tasks.run.keys import BASE, PROMPTS, StageKey
from tasks.run.preflight import preflight
from tasks.run.session import Session
from tasks.run.stages import once, stage


@stage("initial policy", retries=2)
async def make_policy(session: Session) -> Manifest:
    """Build or import the policy that everything starts from."""
    settings = session.settings
    work = PolicyWork(policy=settings.policy, data=settings.data, seed=settings.seed)
    return await once(session, BASE, role="preparation", method="make_policy", work=work)


@stage("prompts {split}", retries=2)
async def make_prompts(session: Session, base: Manifest, split: str) -> Manifest:
    """Render and tokenize one split of the data."""
    settings = session.settings
    work = PromptWork(
        data=settings.data,
        split=split,
        policy=policy_of(base),
        seed=settings.seed,
        max_new_tokens=settings.rollout.sampling.max_new_tokens,
    )
    return await once(session, PROMPTS[split], role="preparation", method="make_prompts", work=work, parents=[base])


def start_pools(session: Session) -> None:
    """Let the workers that stages will ask for start side by side; a finished run needs none."""
    if session.run.find(PROMPTS["heldout"]) is None:
        session.warm("preparation")
    if session.run.find(StageKey.policy(session.settings.iterations)) is None:
        session.warm("update", "scoring")
        session.warm_slots()


async def release_preparation(session: Session) -> None:
    """End the preparation worker: nothing later needs it."""
    await session.release("preparation")


@stage("check inputs")
async def check_inputs(config: BaseModel) -> dict[str, float]:
    """Return what the check found out (sizes and memory estimates). Raises BadInput in one line."""
    return await preflight(config)


async def begin(session: Session) -> None:
    """Make the policy, and both splits of the prompts."""
    base = await make_policy(session)
    await make_prompts(session, base, "train")
    await make_prompts(session, base, "heldout")
