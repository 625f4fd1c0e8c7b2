"""Rollout and scoring controllers over disjoint slices of one batch: side by side, or in turns."""

import asyncio

from flows.rollout import rollout
from flows.scoring import scoring
from flows.session import controllers_of, launch
from placement.shards import slice_shards
from tasks.placement.rebalance import correct_placement
from tasks.placement.stage import learn, place_stage, place_turn
from tasks.run.batch import BatchPlan
from tasks.run.session import RunRef


async def generate_and_score(run: RunRef, plan: BatchPlan) -> None:
    """Return when every shard is generated and scored. One controller's failure stops its peers."""
    placed = await place_stage(run, plan)
    if placed.mode == "colocated":
        async with asyncio.TaskGroup() as group:
            start_rollout(group, run, plan)
        async with asyncio.TaskGroup() as group:
            start_scoring(group, run, plan)  # its works wait for the workers, which take longer
            await place_turn(run, plan, "scoring")
    else:
        async with asyncio.TaskGroup() as watched:
            correcting = watched.create_task(correct_placement(run, plan, placed))
            async with asyncio.TaskGroup() as group:
                start_rollout(group, run, plan)
                start_scoring(group, run, plan)
            correcting.cancel()
    learn(run, plan)


def start_rollout(group: asyncio.TaskGroup, run: RunRef, plan: BatchPlan) -> None:
    """Start the rollout controllers, each with its slice of the shards."""
    for number, shards in enumerate(slice_shards(range(plan.num_shards), controllers=controllers_of(run).count)):
        group.create_task(launch(rollout, run, batch=plan.key, controller=number, shards=shards))


def start_scoring(group: asyncio.TaskGroup, run: RunRef, plan: BatchPlan) -> None:
    """Start the scoring controllers, one for each of rollout."""
    silence = controllers_of(run).silence_seconds
    for number, shards in enumerate(slice_shards(range(plan.num_shards), controllers=controllers_of(run).count)):
        following = launch(scoring, run, batch=plan.key, controller=number, shards=shards, silence_seconds=silence)
        group.create_task(following)
