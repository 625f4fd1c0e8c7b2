"""The scoring controller: follows the commits of its rollout peer, shard by shard."""

import asyncio
from collections.abc import Iterable

from prefect import flow

from flows.session import joined
from tasks.run.batch import Batch
from tasks.run.session import RunRef, Session
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
    async with joined(run) as session, asyncio.TaskGroup() as group:
        planned = Batch.read(session.run, batch)
        mine = planned.shards if shards is None else shards
        follow(group, session, planned, mine, silence_seconds)
    return len(mine)


def follow(
    group: asyncio.TaskGroup, session: Session, batch: Batch, shards: Iterable[int], silence_seconds: float
) -> None:
    """Have shards judged by every served reward and then scored, each as soon as it is generated."""
    for shard in shards:
        for term in session.settings.scoring.model_rewards:
            group.create_task(judge_shard(session, batch, shard, term, silence_seconds))
        group.create_task(score_shard(session, batch, shard, silence_seconds))
