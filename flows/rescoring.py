"""Stored rollouts scored again by other rewards, or credited again by another algorithm; nothing is generated."""

import asyncio
import time

from prefect import flow

from flows.session import controllers_of, reopened
from tasks.offline_training import make_judge, served_terms, train_judge
from tasks.rescoring import (
    adopt_judges,
    begin_recredit,
    begin_rescoring,
    credit_again,
    iterations_left,
    seal_recredit,
    seal_rescoring,
    wake_judges,
    waves_to_rescore,
)
from tasks.run.batch import BatchPlan
from tasks.run.rescorings import Derived, Recredit, Rescoring
from tasks.run.session import RunRef
from tasks.scoring import judge_shard, score_shard


@flow(name="rescore", flow_run_name="{request.config.name} {request.name}")
async def rescore(request: Rescoring) -> None:
    """Score the chosen iterations of a run again; started again, it does what is missing."""
    name, derived = request.name, Derived("rescore", request.name)
    async with reopened(request.config) as run:
        await begin_rescoring(run, name)
        left = await iterations_left(run, derived, request.iterations)
        if not left:
            return
        for term in await adopt_judges(run, name):
            await make_judge(run, term, derived.prefix)
            await train_judge(run, term, derived.prefix)
        await wake_judges(run, name)
        for number in left:
            began = time.monotonic()
            await score_again(run, waves_to_rescore(run, name, number))
            await seal_rescoring(run, name, number, began)


@flow(name="recredit", flow_run_name="{request.config.name} {request.name}")
async def recredit(request: Recredit) -> None:
    """Credit the chosen iterations of a run again; started again, it does what is missing."""
    name, scores = request.name, request.scores
    async with reopened(request.config) as run:
        await begin_recredit(run, name, scores)
        for number in await iterations_left(run, Derived("recredit", name), request.iterations):
            began = time.monotonic()
            await credit_again(run, name, number, scores)
            await seal_recredit(run, name, number, began)


async def score_again(run: RunRef, waves: list[BatchPlan]) -> None:
    """Have every shard of some batches judged by every served reward, then scored."""
    silence = controllers_of(run).silence_seconds
    async with asyncio.TaskGroup() as group:
        for wave in waves:
            for shard in range(wave.num_shards):
                for term in served_terms(run):
                    group.create_task(judge_shard(run, wave, shard, term, silence))
                group.create_task(score_shard(run, wave, shard, silence))
