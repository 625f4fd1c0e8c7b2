"""Generation and scoring of one batch by controllers with disjoint slices of its shards, at the same time or in
turns."""

import asyncio

from flows.controllers import launch
from flows.rollout import rollout
from flows.scoring import scoring
from placement.records import Plan
from tasks.placement.stage import correct_placement, learn, place_stage, place_turn
from tasks.run.batch import Batch, slice_shards
from tasks.run.session import Session


async def generate_and_score(session: Session, batch: Batch) -> None:
    """Generate and score every shard of a batch. The failure of one controller stops the others."""
    async with session.slots_taken:
        plan = await place_stage(session, batch)
        if plan.mode == "colocated":
            await take_turns(session, batch)
        else:
            await side_by_side(session, batch, plan)
        learn(session, batch)


async def take_turns(session: Session, batch: Batch) -> None:
    """Generate with all workers first, and score with all workers after that."""
    async with asyncio.TaskGroup() as group:
        start_rollout(group, session, batch)
    async with asyncio.TaskGroup() as group:
        start_scoring(group, session, batch)  # scoring waits for its workers, whose start takes longer
        await place_turn(session, batch, "scoring")


async def side_by_side(session: Session, batch: Batch, plan: Plan) -> None:
    """Score shards while others are generated, and adapt the split of the workers meanwhile."""
    async with asyncio.TaskGroup() as outer_group:
        correction = outer_group.create_task(correct_placement(session, batch, plan))
        async with asyncio.TaskGroup() as group:
            start_rollout(group, session, batch)
            start_scoring(group, session, batch)
        correction.cancel()


def start_rollout(group: asyncio.TaskGroup, session: Session, batch: Batch) -> None:
    """Start one task per rollout controller, each with its slice of the shards."""
    for number, shards in enumerate(slice_shards(batch.shards, controllers=session.settings.controllers.count)):
        group.create_task(launch(rollout, session, batch=batch.key, controller=number, shards=shards))


def start_scoring(group: asyncio.TaskGroup, session: Session, batch: Batch) -> None:
    """Start one task per scoring controller, each with the slice of one rollout controller."""
    for number, shards in enumerate(slice_shards(batch.shards, controllers=session.settings.controllers.count)):
        group.create_task(launch(scoring, session, batch=batch.key, controller=number, shards=shards))
