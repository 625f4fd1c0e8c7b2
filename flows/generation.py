"""Rollout and scoring controllers in parallel, over disjoint slices of one batch."""

import asyncio

from flows.rollout import rollout
from flows.running import controllers_of, launch
from flows.scoring import scoring
from placement.allocation import deal
from tasks.plan import BatchPlan
from tasks.session import RunRef


async def generate_and_score(run: RunRef, plan: BatchPlan) -> None:
    """Return when every shard is generated and scored. One controller's failure stops its peers."""
    controllers = controllers_of(run)
    slices = deal(range(len(plan.shards)), controllers=controllers.count)
    silence = controllers.silence_seconds
    async with asyncio.TaskGroup() as group:
        for number, shards in enumerate(slices):
            group.create_task(launch(rollout, run, batch=plan.key, controller=number, shards=shards))
            following = launch(scoring, run, batch=plan.key, controller=number, shards=shards, silence_seconds=silence)
            group.create_task(following)
