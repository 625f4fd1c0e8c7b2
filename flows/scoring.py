"""Scoring controller, which scores the shards that its rollout controller commits, one by one."""

import asyncio
from collections.abc import Sequence

from prefect import flow
from prefect.client.schemas.objects import State

from rheostat.flows.controllers import controller_name
from rheostat.flows.run_access import run_controller
from rheostat.tasks.run.batch import Batch
from rheostat.tasks.run.open_run import OpenRun, RunRef
from rheostat.tasks.scoring import judge_shards, score_shards


@flow(name="scoring", flow_run_name=controller_name, persist_result=True, result_serializer="json")
async def scoring(run: RunRef, batch: str | None = None, controller: int = 0, first: int = 1) -> int | State[int]:
    """Score the completions of planned batches as soon as they are generated, as the scoring controller with the number
    `controller`, from iteration `first` on. Return the number of batches, or the state Crashed if the process that has
    locked the run no longer sends requests.

    Args:
        run: The run. Without an epoch (the number of the holder's lease) this flow locks the run itself.
        batch: Batch such as `it-0003` or `eval-0010` with a stored plan. None serves the requests of the run's holder.
        controller: Number of this controller among those that share each batch.
        first: Number of the first iteration for which this controller works.
    """
    return await run_controller(run, batch, work=judge_and_score, slots="scoring")


async def judge_and_score(open_run: OpenRun, batch: Batch, shards: Sequence[int]) -> None:
    """Score the completions in some shards of a batch. First the judges and reward models evaluate the completions,
    then all rewards are combined into scores. The scoring of each shard starts as soon as its completions are
    generated."""
    async with asyncio.TaskGroup() as group:
        for term in open_run.settings.scoring.model_rewards:
            group.create_task(judge_shards(open_run, batch, shards, term))
        group.create_task(score_shards(open_run, batch, shards))
