"""Flows that compute new scores with other rewards, or new advantages with another algorithm, from stored rollouts.

Nothing is generated.
"""

import asyncio
import time

from prefect import flow

from rheostat.flows.run_access import reopen_run
from rheostat.flows.scoring import judge_and_score
from rheostat.tasks.preparation import make_reward_model, train_reward_model
from rheostat.tasks.rescoring import (
    begin_recredit,
    begin_rescoring,
    find_remaining_iterations,
    recompute_credit,
    reuse_reward_models,
    seal_recredit,
    seal_rescoring,
    start_reward_models,
)
from rheostat.tasks.run.rescorings import DerivedResult, Recredit, Rescoring, rescored_batches, with_rescoring_commits


@flow(name="rescore", flow_run_name="{request.config.name} {request.name}")
async def rescore(request: Rescoring) -> None:
    """Score stored rollouts of a run again with other rewards, for the selected iterations. If the flow is started
    again, it only scores the missing iterations."""
    derived = DerivedResult("rescore", request.name)
    config = await asyncio.to_thread(with_rescoring_commits, request.config, derived)
    async with reopen_run(config, has_new_rewards=True) as open_run:
        await begin_rescoring(open_run, derived, request.config.scoring)
        remaining = await find_remaining_iterations(open_run, derived, request.iterations)
        if not remaining:
            return
        for term in await reuse_reward_models(open_run, derived):
            base = await make_reward_model(open_run, term, derived.prefix)
            await train_reward_model(open_run, term, base, derived.prefix)
        await start_reward_models(open_run, derived)
        for iteration in remaining:
            began = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for batch in rescored_batches(iteration, derived):
                    group.create_task(judge_and_score(open_run, batch, batch.shards))
            await seal_rescoring(open_run, derived, iteration, began)


@flow(name="recredit", flow_run_name="{request.config.name} {request.name}")
async def recredit(request: Recredit) -> None:
    """Compute new advantages for stored rollouts of a run, for the selected iterations. If the flow is started again,
    it only computes the missing iterations."""
    derived = DerivedResult("recredit", request.name)
    async with reopen_run(request.config) as open_run:
        await begin_recredit(open_run, derived, request.scores)
        for iteration in await find_remaining_iterations(open_run, derived, request.iterations):
            began = time.monotonic()
            credited = await recompute_credit(open_run, derived, iteration, request.scores)
            await seal_recredit(open_run, derived, iteration, credited, began)
