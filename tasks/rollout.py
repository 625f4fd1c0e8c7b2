"""Generation stage: one task generates the completions for all shards that are assigned to a controller."""

from collections.abc import Sequence

from rheostat.infra.store.manifests import Manifest
from rheostat.models.config.denoising import DenoisingConfig
from rheostat.models.records.versions import policy_of
from rheostat.models.records.work import RolloutWork
from rheostat.tasks.preparation import find_dialogue_with_stored_user
from rheostat.tasks.run.batch import Batch
from rheostat.tasks.run.keys import USER
from rheostat.tasks.run.open_run import OpenRun
from rheostat.tasks.run.stages import run_concurrently, run_once, stage


@stage("{batch.key} generate", retries=2)
async def generate_shards(open_run: OpenRun, batch: Batch, shards: Sequence[int]) -> None:
    """Generate completions for the prompts of some shards on the rollout workers. The completions of each shard are
    stored as soon as all of them are generated."""
    await run_concurrently(_generate_shard(open_run, batch, shard) for shard in shards)


async def _generate_shard(open_run: OpenRun, batch: Batch, shard: int) -> Manifest:
    plan, policy, prompts, continued = batch.plan, batch.policy, batch.prompts, batch.partial_rollouts(shard)
    user = None if find_dialogue_with_stored_user(open_run.settings) is None else open_run.run.require(USER)
    work = RolloutWork(
        iteration=plan.number,
        policy=policy_of(policy),
        prompts=prompts.shards[0],
        rows=plan.shard_rows(shard),
        group_size=plan.group_size,
        sampling=plan.sampling,
        seed=open_run.settings.seed,
        media=batch.media,
        continued=None if continued is None else continued.shards[1],
        partial=open_run.settings.rollout.partial if plan.split == "train" else None,
        user=None if user is None else policy_of(user),
        records_experts=open_run.settings.update.router_replay == "rollout" and plan.split == "train",
        denoising=_denoising_of(open_run, batch),
    )
    parents = [policy, prompts, *(each for each in (continued, user) if each is not None)]
    key = plan.shard_key("rollout", shard)
    return await run_once(open_run, key, role="rollout", method="generate", work=work, parents=parents)


def _denoising_of(open_run: OpenRun, batch: Batch) -> DenoisingConfig | None:
    """Return the settings for generating images with a diffusion policy, or None for other policies. Evaluations may
    use another number of steps."""
    settings, plan = open_run.settings, batch.plan
    denoising, steps = settings.rollout.denoising, settings.evaluation.steps
    if denoising is None or plan.split == "train" or steps is None:
        return denoising
    return denoising.model_copy(update={"steps": steps, "window": None})
