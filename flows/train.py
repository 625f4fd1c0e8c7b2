"""Flow for the main job, which improves a policy iteration by iteration."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from prefect import flow

from flows.iteration import close_iteration, generate_ahead, train_iteration
from flows.measurement import evaluation
from flows.session import hold
from flows.warmup import warmup
from tasks.alarms import apply_alarms, check_alarms
from tasks.commit import retire_policies, retire_rollouts
from tasks.config.run import RunConfig
from tasks.costs import account, check_budget
from tasks.preparation import start_pools
from tasks.reporting import report_run, resume_point, showing_progress
from tasks.run.iteration import Iteration
from tasks.run.keys import evaluation_key
from tasks.run.session import Session
from tasks.tracking.follow import tracked
from tasks.views.summary import RunSummary


@flow(
    name="train", flow_run_name="{config.name}", persist_result=True, result_serializer="json", validate_parameters=True
)
async def train(config: RunConfig, accept_change: bool = False) -> RunSummary:
    """Retrain a language model by reinforcement learning. If started again, it continues from the store.

    Args:
        config: Configuration of the run.
        accept_change: Resume even if reward code, data files or library versions have changed.
    """
    holding = hold(config, accept_change=accept_change, last=evaluation_key(config.iterations))
    async with holding as session, tracked(session):
        if session.is_over:
            retire_policies(session, Iteration(session.run, config.iterations))
            retire_rollouts(session, Iteration(session.run, config.iterations))
        else:
            await iterate(session)
        return await report_run(session)


async def iterate(session: Session) -> None:
    """Run the remaining iterations, starting with the sealing of iterations that were interrupted before their seal.

    A single thread seals iterations, so seals stay in order. The run stays locked until this thread has ended.
    """
    config, (unclosed, remaining) = session.settings, resume_point(session)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="book-keeping") as thread:
        for number in unclosed:
            apply_alarms(session, number)
            await close_iteration(session, number, thread)
        check_budget(session)
        check_alarms(session)
        start_pools(session)
        await warmup(session.ref)
        if config.evaluation.is_due(remaining.start - 1):
            await evaluation(session, remaining.start - 1)
        async with showing_progress(session):
            async with asyncio.TaskGroup() as group:
                closing_task = None
                async for number in generate_ahead(group, session, remaining):
                    await train_iteration(session, number)
                    must_end = apply_alarms(session, number)
                    must_end |= await account(session, number)
                    if closing_task is not None:
                        await closing_task
                    closing_task = group.create_task(close_iteration(session, number, thread))
                    if must_end:  # rollouts generated ahead are committed and used when the run continues
                        break
                    if config.evaluation.is_due(number):
                        await evaluation(session, number)
            check_budget(session)
            check_alarms(session)
    await evaluation(session, config.iterations)
