"""Flows that score stored rollouts again with other rewards, or credit them again with another algorithm.

Nothing is generated.
"""

import asyncio
import time

from prefect import flow

from flows.run_access import reopen_run
from flows.scoring import judge_and_score
from tasks.preparation import make_reward_model, train_reward_model
from tasks.rescoring import (
    adopt_reward_models,
    begin_recredit,
    begin_rescoring,
    credit_again,
    iterations_left,
    seal_recredit,
    seal_rescoring,
    wake_reward_models,
)
from tasks.run.rescorings import Derived, Recredit, Rescoring, rescored_batches


@flow(name="rescore", flow_run_name="{request.config.name} {request.name}")
async def rescore(request: Rescoring) -> None:
    """Score the selected iterations of a run again. If started again, only missing iterations are scored."""
    derived = Derived("rescore", request.name)
    async with reopen_run(request.config) as open_run:
        await begin_rescoring(open_run, derived)
        remaining = await iterations_left(open_run, derived, request.iterations)
        if not remaining:
            return
        for term in await adopt_reward_models(open_run, derived):
            base = await make_reward_model(open_run, term, derived.prefix)
            await train_reward_model(open_run, term, base, derived.prefix)
        await wake_reward_models(open_run, derived)
        for iteration in remaining:
            began = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for batch in rescored_batches(iteration, derived):
                    group.create_task(judge_and_score(open_run, batch, batch.shards))
            await seal_rescoring(open_run, derived, iteration, began)


@flow(name="recredit", flow_run_name="{request.config.name} {request.name}")
async def recredit(request: Recredit) -> None:
    """Compute the credit of the selected iterations of a run again. If started again, only missing iterations are
    computed."""
    derived = Derived("recredit", request.name)
    async with reopen_run(request.config) as open_run:
        await begin_recredit(open_run, derived, request.scores)
        for iteration in await iterations_left(open_run, derived, request.iterations):
            began = time.monotonic()
            credited = await credit_again(open_run, derived, iteration, request.scores)
            await seal_recredit(open_run, derived, iteration, credited, began)
