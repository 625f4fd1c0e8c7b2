"""Flow for the main job, which improves a policy iteration by iteration."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from prefect import flow

from rheostat.flows.iteration import close_iteration, generate_ahead, train_iteration
from rheostat.flows.measurement import evaluate_iteration
from rheostat.flows.run_access import lock_run
from rheostat.flows.warmup import prepare_run
from rheostat.tasks.alarms import apply_alarms, check_alarms
from rheostat.tasks.commit import retire_policies, retire_rollouts
from rheostat.tasks.config.run import RunConfig
from rheostat.tasks.costs import check_budget, record_costs
from rheostat.tasks.preparation import start_pools
from rheostat.tasks.reporting import find_remaining_iterations, keep_pages_updated, report_run
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.run.keys import evaluation_key
from rheostat.tasks.run.open_run import OpenRun
from rheostat.tasks.tracking.follow import mirror_to_trackers
from rheostat.tasks.views.summary import RunSummary


@flow(
    name="train", flow_run_name="{config.name}", persist_result=True, result_serializer="json", validate_parameters=True
)
async def train(config: RunConfig, accept_change: bool = False) -> RunSummary:
    """Train a model by reinforcement learning. If the flow is started again, it continues from the results in the
    store.

    Args:
        config: Configuration of the run.
        accept_change: Resume even if reward code, data files or library versions have changed.
    """
    locked_run = lock_run(config, accept_change=accept_change, final_key=evaluation_key(config.iterations))
    async with locked_run as open_run, mirror_to_trackers(open_run):
        if open_run.is_finished:
            retire_policies(open_run, Iteration(open_run.run, config.iterations))
            retire_rollouts(open_run, Iteration(open_run.run, config.iterations))
        else:
            await run_iterations(open_run)
            await evaluate_iteration(open_run, config.iterations)
        return await report_run(open_run)


async def run_iterations(
    open_run: OpenRun, *, last: int | None = None, must_stop: Callable[[int], bool] = lambda _: False
) -> None:
    """Run the remaining iterations of a run, with evaluations, until the configured number of iterations is reached, or
    until an alarm or the budget ends the run. Evaluating the last policy is left to the caller.

    The run also ends after iteration `last`, and after the first iteration for which `must_stop` returns True. In these
    cases, alarms and the budget are not checked any more.

    Iterations that were trained but not marked as complete (sealed) before an interruption are sealed first. A single
    thread seals iterations, so seals stay in order. The run stays locked until this thread has ended.
    """
    config, (unclosed, remaining) = open_run.settings, find_remaining_iterations(open_run)
    remaining = range(remaining.start, remaining.stop if last is None else min(remaining.stop, last + 1))
    newest = remaining.start - 1

    def is_over(number: int) -> bool:
        return number == last or must_stop(number)

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="book-keeping") as thread:
        for number in unclosed:
            apply_alarms(open_run, number)
            await close_iteration(open_run, number, thread)
        if is_over(newest):
            return
        check_budget(open_run)
        check_alarms(open_run)
        start_pools(open_run)
        await prepare_run(open_run.ref)
        if config.evaluation.is_due(newest):
            await evaluate_iteration(open_run, newest)
        async with keep_pages_updated(open_run):
            async with asyncio.TaskGroup() as group:
                closing_task = None
                async for number in generate_ahead(group, open_run, remaining):
                    await train_iteration(open_run, number)
                    must_end = apply_alarms(open_run, number)
                    must_end |= await record_costs(open_run, number)
                    must_end |= is_over(number)
                    newest = number
                    if closing_task is not None:
                        await closing_task
                    closing_task = group.create_task(close_iteration(open_run, number, thread))
                    if must_end:  # rollouts generated ahead are committed and used when the run continues
                        break
                    if config.evaluation.is_due(number):
                        await evaluate_iteration(open_run, number)
            if not is_over(newest):
                check_budget(open_run)
                check_alarms(open_run)
