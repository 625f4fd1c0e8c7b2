"""Flows that train a policy on the stored rollouts of another run, to find out what it would have learned from them
with other settings."""

import asyncio
from functools import partial
from typing import Annotated

from prefect import flow
from prefect.artifacts import acreate_markdown_artifact
from pydantic import Field

from rheostat.flows.fork import fork
from rheostat.flows.measurement import evaluate_iteration
from rheostat.flows.run_access import lock_run
from rheostat.flows.train import run_iterations
from rheostat.infra.store.runs import Run
from rheostat.infra.store.runs import open_run as open_stored_run
from rheostat.tasks.config.run import RunConfig
from rheostat.tasks.forks.answer import BOUND, WhatIfAnswer, read_answer, read_iteration
from rheostat.tasks.forks.creation import create_fork, request_fork
from rheostat.tasks.forks.replay import check_continuation
from rheostat.tasks.preparation import check_and_adapt
from rheostat.tasks.reporting import report_run
from rheostat.tasks.run.keys import artifact_key, evaluation_key, iteration_key
from rheostat.tasks.run.preflight import mark_as_checked
from rheostat.tasks.tracking.follow import mirror_to_trackers
from rheostat.tasks.views.metrics import sealed_iterations

Bound = Annotated[float, Field(gt=0, le=1)]


@flow(name="what-if", flow_run_name="{name}", validate_parameters=True)
async def what_if(
    point: str,
    name: str,
    overrides: list[str] | None = None,
    store: str = "./runs",
    bound: Bound = BOUND,
    continues: bool = False,
    accept_change: bool = False,
) -> WhatIfAnswer:
    """Train with other settings on the stored rollouts of a run, and report up to which iteration the result can be
    trusted. If the flow is started again with the same arguments, it continues.

    Args:
        point: Run whose rollouts are used, and the last iteration before the change, such as `demo@0`.
        name: Name of the what-if run.
        overrides: Settings that differ, such as `update.learning_rate=1e-4`.
        store: Store that contains both runs.
        bound: Lowest effective sample size, relative to that of the parent, with which an iteration is trusted.
        continues: Fork the what-if run after the last trusted iteration, and train the fork on its own rollouts.
        accept_change: Continue even if reward code or library versions have changed since the run was created.
    """
    planned = await asyncio.to_thread(request_fork, store, point, name, overrides=overrides or [], is_what_if=True)
    if continues:
        check_continuation(planned.config)
    config = await check_and_adapt(planned.config)
    await asyncio.to_thread(create_fork, planned)
    with mark_as_checked():
        answer = await replay(config, bound=bound, accept_change=accept_change)
    if continues and (words := answer.fork_arguments(planned.config.iterations)):
        point, fork_name, *changes = words
        await fork(point, fork_name, [*(overrides or []), *changes], store=store, accept_change=accept_change)
    return answer


@flow(name="replay", flow_run_name="{config.name}", validate_parameters=True)
async def replay(config: RunConfig, bound: Bound = BOUND, accept_change: bool = False) -> WhatIfAnswer:
    """Train the iterations of a what-if run on the rollouts that it shares, until an iteration cannot be trusted, and
    publish the answer in Prefect.

    Args:
        config: Configuration of an existing what-if run.
        bound: Lowest effective sample size, relative to that of the parent, with which an iteration is trusted.
        accept_change: Continue even if reward code or library versions have changed.
    """
    run = open_stored_run(config.store, config.name)
    fork = run.fork
    assert fork is not None, "a what-if run is a fork"
    parent, last = open_stored_run(config.store, fork.parent), min(config.iterations, max(fork.replayed))

    def must_stop(run: Run, newest: int) -> bool:
        return any(read_iteration(run, parent, each).is_below(bound) for each in range(fork.iteration + 1, newest + 1))

    done = len(sealed_iterations(run))
    final_key = iteration_key(done) if done < last and must_stop(run, done) else evaluation_key(last)
    async with (
        lock_run(config, accept_change=accept_change, final_key=final_key) as open_run,
        mirror_to_trackers(open_run),
    ):
        if not open_run.is_finished:
            await run_iterations(open_run, last=last, must_stop=partial(must_stop, open_run.run))
            if len(sealed_iterations(open_run.run)) == last:
                await evaluate_iteration(open_run, last)
        await report_run(open_run)
    answer = await asyncio.to_thread(read_answer, config.store, config.name, bound=bound, last=last)
    page = "\n\n".join([f"# What-if run {answer.run}", f"```text\n{answer.text()}\n```"])
    await acreate_markdown_artifact(page, key=f"{artifact_key(config.name)}-what-if", description="Answer")
    return answer
