"""The rollout controller: a slice of every batch's shards."""

import asyncio
from functools import partial

from prefect import flow

from flows.controllers import controller_name, serve
from flows.session import joined
from tasks.rollout import generate_shard
from tasks.run.batch import Batch
from tasks.run.session import RunRef, Session


@flow(name="rollout", flow_run_name=controller_name, persist_result=True, result_serializer="json")
async def rollout(
    run: RunRef, batch: str | None = None, controller: int = 0, shards: tuple[int, ...] | None = None
) -> int:
    """Have shards of planned batches generated and committed; return how many shards, or batches.

    Args:
        run: The run; without an epoch this flow takes it over.
        batch: `it-0003` or `eval-0010`, whose plan is in the store; none has it follow the run, batch after batch.
        controller: Number of this controller among its peers.
        shards: Numbers of the shards; none means all.
    """
    async with joined(run) as session:
        if batch is None:
            return await serve(rollout.name, controller, partial(generate, session))
        return await generate(session, batch, shards)


async def generate(session: Session, batch: str, shards: tuple[int, ...] | None) -> int:
    """Have shards of a planned batch, by default all, generated; return how many."""
    planned = Batch.read(session.run, batch)
    mine = planned.shards if shards is None else shards
    async with asyncio.TaskGroup() as group:
        for shard in mine:
            group.create_task(generate_shard(session, planned, shard))
    return len(mine)
