"""Generation and scoring of one batch, at the same time or one after the other. Each controller works on separate
shards of the batch."""

import asyncio

from rheostat.flows.controllers import run_on_controller
from rheostat.flows.rollout import rollout
from rheostat.flows.scoring import scoring
from rheostat.placement.records import Plan
from rheostat.tasks.placement.stage import (
    correct_placement,
    give_slots_to,
    give_slots_to_scoring,
    place_stage,
    record_measurements,
)
from rheostat.tasks.run.batch import Batch, slice_shards
from rheostat.tasks.run.open_run import OpenRun


async def generate_and_score(open_run: OpenRun, batch: Batch) -> None:
    """Generate and score all completions of a batch. The placement policy decides how many workers generate and how
    many score, and whether both happen at the same time. If one task fails, the others stop. The completions of a
    what-if run are stored already."""
    async with open_run.slots_lock:
        if batch.is_replayed:
            await score_stored_rollouts(open_run, batch)
            return
        plan = await place_stage(open_run, batch)
        if plan.mode == "colocated":
            await generate_then_score(open_run, batch)
        else:
            await score_while_generating(open_run, batch, plan)
        record_measurements(open_run, batch)


async def generate_then_score(open_run: OpenRun, batch: Batch) -> None:
    """Generate all completions of a batch with all worker slots (places for one worker each), and then score all
    completions with all slots."""
    async with asyncio.TaskGroup() as group:
        start_rollout(group, open_run, batch)
    async with asyncio.TaskGroup() as group:
        start_scoring(group, open_run, batch)  # scoring waits for its workers, whose start takes longer
        await give_slots_to(open_run, batch, "scoring")


async def score_while_generating(open_run: OpenRun, batch: Batch, plan: Plan) -> None:
    """Score the completed shards of a batch while other shards are still generated. `plan` assigns the workers to both
    tasks, and workers are reassigned if the measured speeds require it."""
    async with asyncio.TaskGroup() as outer_group:
        correction = outer_group.create_task(correct_placement(open_run, batch, plan))
        async with asyncio.TaskGroup() as group:
            start_rollout(group, open_run, batch)
            start_scoring(group, open_run, batch)
        correction.cancel()


async def score_stored_rollouts(open_run: OpenRun, batch: Batch) -> None:
    """Score the completions of a batch that are stored already, with all slots. No worker loads the policy."""
    keys = [batch.plan.shard_key("scoring", shard) for shard in batch.shards]
    if all(map(open_run.run.has, keys)):
        return
    await give_slots_to_scoring(open_run, batch)
    async with asyncio.TaskGroup() as group:
        start_scoring(group, open_run, batch)


def start_rollout(group: asyncio.TaskGroup, open_run: OpenRun, batch: Batch) -> None:
    """Start the generation of a batch's completions in a task group. The shards of the batch are divided among the
    rollout controllers (flows that send work to workers), with one task per controller."""
    for number, shards in enumerate(slice_shards(batch.shards, controllers=open_run.settings.controllers.count)):
        group.create_task(run_on_controller(rollout, open_run, batch=batch.key, controller=number, shards=shards))


def start_scoring(group: asyncio.TaskGroup, open_run: OpenRun, batch: Batch) -> None:
    """Start the scoring of a batch's completions in a task group. The shards of the batch are divided among the scoring
    controllers (flows that send work to workers), with one task per controller."""
    for number, shards in enumerate(slice_shards(batch.shards, controllers=open_run.settings.controllers.count)):
        group.create_task(run_on_controller(scoring, open_run, batch=batch.key, controller=number, shards=shards))
