"""The main job: a policy, improved iteration by iteration."""

import asyncio

from prefect import flow

from flows.evaluation import evaluation
from flows.iteration import generated, learning
from flows.session import hold
from flows.warmup import warmup
from tasks.commit import retire_policies
from tasks.config.run import RunConfig
from tasks.preparation import start_pools
from tasks.reporting import RunSummary, report_iteration, report_run, resume_point
from tasks.run.iteration import Iteration
from tasks.run.keys import evaluation_key
from tasks.run.session import Session


@flow(
    name="train", flow_run_name="{config.name}", persist_result=True, result_serializer="json", validate_parameters=True
)
async def train(config: RunConfig, accept_change: bool = False) -> RunSummary:
    """Retrain a language model by reinforcement learning; started again, it continues where the store ends.

    Args:
        config: The run.
        accept_change: Go on although code of targets, data files or libraries are not those of the run.
    """
    async with hold(config, accept_change=accept_change, last=evaluation_key(config.iterations)) as session:
        if session.is_over:
            for number in resume_point(session):
                retire_policies(session, Iteration(session.run, number))
        else:
            await iterate(session)
        return await report_run(session)


async def iterate(session: Session) -> None:
    """Go through what is left of a run."""
    config = session.settings
    start_pools(session)
    await warmup(session.ref)
    await evaluation(session, 0)
    async with asyncio.TaskGroup() as beside:
        reported = None
        async for number in generated(beside, session, resume_point(session)):
            await learning(session, number)
            if reported is not None:
                await reported
            reported = beside.create_task(report_iteration(session, number))
            if config.evaluation.every and number % config.evaluation.every == 0:
                await evaluation(session, number)
    await evaluation(session, config.iterations)
