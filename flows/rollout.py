"""The rollout controller: one slice of a batch's shards."""

import asyncio

from prefect import flow

from flows.running import joined
from tasks.plan import BatchPlan
from tasks.rollout import generate_shard
from tasks.session import RunRef


@flow(name="rollout", flow_run_name="{plan.key} rollout {controller}", persist_result=True, result_serializer="json")
async def rollout(run: RunRef, plan: BatchPlan, controller: int, shards: tuple[int, ...]) -> int:
    """Have every shard of the slice generated and committed; return how many."""
    async with joined(run) as here, asyncio.TaskGroup() as group:
        for shard in shards:
            group.create_task(generate_shard(here, plan, shard))
    return len(shards)
