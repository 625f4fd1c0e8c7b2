"""Generation and scoring of one batch, at the same time or one after the other. Each controller works on separate
shards of the batch."""

import asyncio

from flows.controllers import run_on_controller
from flows.rollout import rollout
from flows.scoring import scoring
from placement.records import Plan
from tasks.placement.stage import correct_placement, give_slots_to, place_stage, record_measurements
from tasks.run.batch import Batch, slice_shards
from tasks.run.open_run import OpenRun


async def generate_and_score(open_run: OpenRun, batch: Batch) -> None:
    """Generate and score all completions of a batch, with workers assigned as the placement policy decides. The failure
    of one controller stops the others."""
    async with open_run.slots_lock:
        plan = await place_stage(open_run, batch)
        if plan.mode == "colocated":
            await generate_then_score(open_run, batch)
        else:
            await score_while_generating(open_run, batch, plan)
        record_measurements(open_run, batch)


async def generate_then_score(open_run: OpenRun, batch: Batch) -> None:
    """Generate all completions with all worker slots, and then score them with all worker slots."""
    async with asyncio.TaskGroup() as group:
        start_rollout(group, open_run, batch)
    async with asyncio.TaskGroup() as group:
        start_scoring(group, open_run, batch)  # scoring waits for its workers, whose start takes longer
        await give_slots_to(open_run, batch, "scoring")


async def score_while_generating(open_run: OpenRun, batch: Batch, plan: Plan) -> None:
    """Score shards while other shards are generated, and move workers between generation and scoring as needed."""
    async with asyncio.TaskGroup() as outer_group:
        correction = outer_group.create_task(correct_placement(open_run, batch, plan))
        async with asyncio.TaskGroup() as group:
            start_rollout(group, open_run, batch)
            start_scoring(group, open_run, batch)
        correction.cancel()


def start_rollout(group: asyncio.TaskGroup, open_run: OpenRun, batch: Batch) -> None:
    """Let each rollout controller generate a part of the batch's shards. Starts one task per controller."""
    for number, shards in enumerate(slice_shards(batch.shards, controllers=open_run.settings.controllers.count)):
        group.create_task(run_on_controller(rollout, open_run, batch=batch.key, controller=number, shards=shards))


def start_scoring(group: asyncio.TaskGroup, open_run: OpenRun, batch: Batch) -> None:
    """Let each scoring controller score the shards that one rollout controller generates. Starts one task per
    controller."""
    for number, shards in enumerate(slice_shards(batch.shards, controllers=open_run.settings.controllers.count)):
        group.create_task(run_on_controller(scoring, open_run, batch=batch.key, controller=number, shards=shards))
