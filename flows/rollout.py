"""The rollout controller: one slice of a batch's shards."""

import asyncio

from prefect import flow

from flows.session import joined
from tasks.rollout import generate_shard
from tasks.run.batch import Batch
from tasks.run.session import RunRef


@flow(name="rollout", flow_run_name="{batch} rollout {controller}", persist_result=True, result_serializer="json")
async def rollout(run: RunRef, batch: str, controller: int = 0, shards: tuple[int, ...] | None = None) -> int:
    """Have the shards of a planned batch, by default all, generated and committed; return how many.

    Args:
        run: The run; without an epoch this flow takes it over.
        batch: `it-0003` or `eval-0010`; its plan is in the store.
        controller: Number of this controller among its peers.
        shards: Numbers of the shards; none means all.
    """
    async with joined(run) as session, asyncio.TaskGroup() as group:
        planned = Batch.read(session.run, batch)
        mine = planned.shards if shards is None else shards
        for shard in mine:
            group.create_task(generate_shard(session, planned, shard))
    return len(mine)
