"""The scoring controller: follows the commits of its rollout peer, shard by shard."""

import asyncio

from prefect import flow

from flows.running import joined
from tasks.plan import BatchPlan
from tasks.scoring import score_shard
from tasks.session import RunRef


@flow(name="scoring", flow_run_name="{plan.key} scoring {controller}", persist_result=True, result_serializer="json")
async def scoring(
    run: RunRef, plan: BatchPlan, controller: int, shards: tuple[int, ...], silence_seconds: float = 900
) -> int:
    """Have every shard of the slice scored as soon as it is generated; return how many."""
    async with joined(run) as here, asyncio.TaskGroup() as group:
        for shard in shards:
            group.create_task(score_shard(here, plan, shard, silence_seconds))
    return len(shards)
