"""Which process holds a run, and where its controllers run."""

import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Literal, ParamSpec

from prefect.deployments import arun_deployment
from prefect.flows import Flow
from prefect.runtime import deployment

from flows.config import ControllersConfig, RunConfig, parse_config
from infra.errors import WorkerLost
from infra.runs import create_run, open_run
from tasks.preflight import check_inputs
from tasks.session import RunRef, is_open, open_session, session_of

P = ParamSpec("P")


@asynccontextmanager
async def hold(config: RunConfig) -> AsyncIterator[RunRef]:
    """Make or reopen the configured run, take it for this process, and open its pools.

    Raises BadInput before anything is written, RunHeld if another process has it, RunChanged if it was made otherwise.
    """
    if deployment.id is not None:  # the command line has checked before it started anything
        await check_inputs(config)
    run = create_run(config.store, config.name, json.dumps(config.identity()), config.fingerprint())
    with run.hold():
        async with open_session(run, config, store=config.store) as ref:
            yield ref


@asynccontextmanager
async def joined(ref: RunRef) -> AsyncIterator[RunRef]:
    """The run as a controller sees it: open in this process already, or joined by a process of its own."""
    if is_open(ref):
        yield ref
        return
    run = open_run(ref.store, ref.name)
    config = parse_config({**run.record.config, "name": ref.name, "store": ref.store}, source=f"run {ref.name}")
    if ref.epoch is None:
        with run.hold():
            async with open_session(run, config, store=ref.store) as here:
                yield here
    else:
        async with open_session(run.join(ref.epoch), config, store=ref.store, join=ref.cluster) as here:
            yield here


def controllers_of(run: RunRef) -> ControllersConfig:
    """How the run's controllers are configured."""
    settings = session_of(run).settings
    assert isinstance(settings, RunConfig)
    return settings.controllers


async def launch(
    role: Flow[P, Coroutine[object, object, int]],
    where: Literal["nested", "deployment"],
    /,
    *args: P.args,
    **parameters: P.kwargs,
) -> None:
    """Run a role controller to its end, as a sub-flow here or as a run of its own deployment."""
    if where == "nested":
        await role(*args, **parameters)
        return
    name = f"{role.name}/controller"
    child = await arun_deployment(name, parameters=dict(parameters), poll_interval=0.5, as_subflow=True)
    if child.state is None or not child.state.is_completed():
        state = "no state" if child.state is None else f"{child.state.name}: {child.state.message}"
        raise WorkerLost(f"controller {name} ({child.name}) ended as {state}")
