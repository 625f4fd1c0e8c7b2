"""The scoring controller: follows the commits of its rollout peer, shard by shard."""

import asyncio
from collections.abc import Sequence

from prefect import flow
from prefect.client.schemas.objects import State

from flows.controllers import controller_name
from flows.session import control
from tasks.run.batch import Batch
from tasks.run.session import RunRef, Session
from tasks.scoring import judge_shards, score_shards


@flow(name="scoring", flow_run_name=controller_name, persist_result=True, result_serializer="json")
async def scoring(run: RunRef, batch: str | None = None, controller: int = 0, first: int = 1) -> int | State[int]:
    """Have shards of planned batches scored as soon as they are generated; return of how many batches.

    Args:
        run: The run; without an epoch this flow takes it over.
        batch: `it-0003` or `eval-0010`, whose plan is in the store; none has it follow the orders of the run's holder.
        controller: Number of this controller among its peers.
        first: Number of the iteration that it follows the run from.
    """
    return await control(run, batch, work=follow, slots="scoring")


async def follow(session: Session, batch: Batch, shards: Sequence[int]) -> None:
    """Have shards judged by every served reward and then scored, each as soon as it is generated."""
    async with asyncio.TaskGroup() as group:
        for term in session.settings.scoring.model_rewards:
            group.create_task(judge_shards(session, batch, shards, term))
        group.create_task(score_shards(session, batch, shards))
