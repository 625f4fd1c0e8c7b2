"""Generation stage: one task for the shards of a controller."""

from collections.abc import Sequence

from infra.store.manifests import Manifest
from models.config.denoising import DenoisingConfig
from models.records.versions import policy_of
from models.records.work import RolloutWork
from tasks.preparation import held_dialogue
from tasks.run.batch import Batch
from tasks.run.keys import USER
from tasks.run.session import Session
from tasks.run.stages import once, side_by_side, stage


@stage("{batch.key} generate", retries=2)
async def generate_shards(session: Session, batch: Batch, shards: Sequence[int]) -> None:
    """Let rollout workers complete the prompts of some shards. Each shard is committed as soon as it is complete."""
    await side_by_side(_generate_shard(session, batch, shard) for shard in shards)


async def _generate_shard(session: Session, batch: Batch, shard: int) -> Manifest:
    plan, policy, prompts, continued = batch.plan, batch.policy, batch.prompts, batch.continued(shard)
    user = None if held_dialogue(session.settings) is None else session.run.require(USER)
    work = RolloutWork(
        iteration=plan.number,
        policy=policy_of(policy),
        prompts=prompts.shards[0],
        rows=plan.shard_rows(shard),
        group_size=plan.group_size,
        sampling=plan.sampling,
        seed=session.settings.seed,
        media=batch.media,
        continued=None if continued is None else continued.shards[1],
        partial=session.settings.rollout.partial if plan.split == "train" else None,
        user=None if user is None else policy_of(user),
        records_experts=session.settings.update.router_replay == "rollout" and plan.split == "train",
        denoising=_denoising_of(session, batch),
    )
    parents = [policy, prompts, *(each for each in (continued, user) if each is not None)]
    key = plan.shard_key("rollout", shard)
    return await once(session, key, role="rollout", method="generate", work=work, parents=parents)


def _denoising_of(session: Session, batch: Batch) -> DenoisingConfig | None:
    """Return the denoising settings for generating images. An evaluation may use another number of steps."""
    settings, plan = session.settings, batch.plan
    denoising, steps = settings.rollout.denoising, settings.evaluation.steps
    if denoising is None or plan.split == "train" or steps is None:
        return denoising
    return denoising.model_copy(update={"steps": steps, "window": None})
