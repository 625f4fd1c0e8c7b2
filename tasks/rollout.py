"""Generation: one task per shard."""

from infra.store.manifests import Manifest
from models.records.versions import policy_of
from models.records.work import RolloutWork
from tasks.run.batch import Batch
from tasks.run.session import Session
from tasks.run.stages import once, stage


@stage("{batch.key} generate {shard:04d}", retries=2)
async def generate_shard(session: Session, batch: Batch, shard: int) -> Manifest:
    """Have a rollout worker complete one shard's prompts and commit what it wrote."""
    plan, policy, prompts, continued = batch.plan, batch.policy, batch.prompts, batch.continued(shard)
    work = RolloutWork(
        iteration=plan.number,
        policy=policy_of(policy),
        prompts=prompts.shards[0],
        rows=plan.shard_rows(shard),
        group_size=plan.group_size,
        sampling=plan.sampling,
        seed=session.settings.seed,
        continued=None if continued is None else continued.shards[1],
        partial=session.settings.rollout.partial if plan.split == "train" else None,
    )
    parents = [policy, prompts, *([] if continued is None else [continued])]
    key = plan.shard_key("rollout", shard)
    return await once(session, key, role="rollout", method="generate", work=work, parents=parents)
