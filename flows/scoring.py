"""The scoring controller: follows the commits of its rollout peer, shard by shard."""

import asyncio

from prefect import flow

from flows.session import joined
from tasks.offline_training import served_terms
from tasks.plan import read_plan
from tasks.run.session import RunRef
from tasks.scoring import judge_shard, score_shard


@flow(name="scoring", flow_run_name="{batch} scoring {controller}", persist_result=True, result_serializer="json")
async def scoring(
    run: RunRef,
    batch: str,
    controller: int = 0,
    shards: tuple[int, ...] | None = None,
    silence_seconds: float = 900,
) -> int:
    """Have the shards of a planned batch, by default all, scored as soon as they are generated; return how many.

    Args:
        run: The run; without an epoch this flow takes it over.
        batch: `it-0003` or `eval-0010`; its plan is in the store.
        controller: Number of this controller among its peers.
        shards: Numbers of the shards; none means all.
        silence_seconds: Longest time to wait for the next generated shard.
    """
    async with joined(run) as here, asyncio.TaskGroup() as group:
        plan = read_plan(here, batch)
        mine = range(plan.num_shards) if shards is None else shards
        for shard in mine:
            for term in served_terms(here):
                group.create_task(judge_shard(here, plan, shard, term, silence_seconds))
            group.create_task(score_shard(here, plan, shard, silence_seconds))
    return len(mine)
