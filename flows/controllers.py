"""Controllers: sub-flows that each perform one role of a run (rollout, scoring or update) by sending work to workers.
They run in this process or as flow runs of separate deployments.

The holder is the process that has locked the run. It sends work requests (some shards of a batch) to each controller. A
controller serves a fixed number of iterations and is then replaced by a new one.
"""

import asyncio
import contextvars
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from math import ceil
from typing import Concatenate

from prefect import tags
from prefect.client.schemas.objects import State
from prefect.flows import Flow
from prefect.runtime import flow_run

from rheostat.flows.deployed_controllers import DeployedController, FlowRuns, connect_to_prefect
from rheostat.infra.errors import first_cause
from rheostat.tasks.run.keys import StageKey, iteration_key
from rheostat.tasks.run.open_run import OpenRun, RunRef
from rheostat.tasks.run.work_queue import (
    BatchRequest,
    ControllerSpan,
    RunBatch,
    Shards,
    delete_old_messages,
    messages_folder,
    read_messages,
)

Role = Flow[Concatenate[RunRef, ...], Coroutine[object, object, int | State[int]]]
"""Prefect flow that performs one role of a run (rollout, scoring or update). If it is called with a batch, it processes
this batch and ends. Otherwise it serves requests of the process that has locked the run, until that process ends it."""


class Controllers:
    """Running controllers of an open run. A controller is a Prefect flow run that sends the work of one role to
    workers. Each controller starts with its first request, serves a number of iterations
    (`controllers.iterations_per_flow_run`), and is then replaced by a new flow run.

    Creating flow runs is the largest cost of using Prefect. So a controller's flow run serves many batches.
    """

    def __init__(self, group: asyncio.TaskGroup, open_run: OpenRun, *, deployed: FlowRuns | None) -> None:
        self._group, self._open_run, self._deployed = group, open_run, deployed
        self._around = contextvars.copy_context()
        """Context of the flow that has locked the run. Controllers are started in it, so they become sub-flows of this
        flow."""
        self._serving: dict[tuple[str, int | None], ControllerSpan] = {}

    def send(self, role: Role, number: int | None, request: BatchRequest) -> None:
        """Send a request for work on a batch to a controller, which is the flow run for one role. If the current
        controller has served all its iterations, start a new one.

        `number` identifies the controller if its role has several controllers, otherwise it is None.
        """
        slot, iteration = (role.name, number), StageKey.of(request.batch, "plan").number
        serving, span = self._serving.get(slot), self._open_run.settings.controllers.iterations_per_flow_run
        if serving is None or serving.last < iteration:
            if serving is not None:
                serving.requests.put_nowait(None)
            last = span * max(1, ceil(iteration / span))
            serving = self._serving[slot] = ControllerSpan(last - span + 1, last)
            flow_context = self._around.copy()
            flow_context.run(_SPAN.set, serving)
            self._group.create_task(self._controller(role, number, serving), context=flow_context)
        serving.requests.put_nowait(request)

    def close(self) -> None:
        """Signal all controllers (flow runs of one role each) to end after they have served their pending requests."""
        for serving in self._serving.values():
            serving.requests.put_nowait(None)

    async def _controller(self, role: Role, number: int | None, controller_span: ControllerSpan) -> None:
        if self._deployed is not None:
            await DeployedController(
                role.name, self._open_run, number, controller_span=controller_span, flow_runs=self._deployed
            ).serve()
            return
        share = {} if number is None else {"controller": number}
        with tags(role.name):
            await role(self._open_run.ref, first=controller_span.first, **share)


_CONTROLLERS: contextvars.ContextVar[Controllers] = contextvars.ContextVar("controllers")
_SPAN: contextvars.ContextVar[ControllerSpan] = contextvars.ContextVar("controller_span")


@asynccontextmanager
async def open_controllers(open_run: OpenRun) -> AsyncIterator[None]:
    """Run the block with controllers available. A controller is a flow that sends the work of one role to workers, and
    `run_on_controller` uses it. An error in one controller stops the other controllers and the main flow."""
    try:
        async with AsyncExitStack() as stack:
            deployed = None
            delete_old_messages(open_run.run)
            if open_run.settings.controllers.where == "deployment":
                deployed = await stack.enter_async_context(connect_to_prefect())
            async with asyncio.TaskGroup() as group:
                before = _CONTROLLERS.set(opened := Controllers(group, open_run, deployed=deployed))
                try:
                    yield
                finally:
                    _CONTROLLERS.reset(before)
                    opened.close()
    except BaseExceptionGroup as several:
        raise first_cause(several) from several


async def serve_requests(open_run: OpenRun, run_batch: RunBatch) -> int:
    """Serve the work requests that this controller receives, until the sender ends them. `run_batch` does the work of
    one request. Return the number of requests."""
    count, controller_span = 0, _SPAN.get(None)
    works = _received_work(open_run, run_batch) if controller_span is None else _queued_work(controller_span, run_batch)
    async with asyncio.TaskGroup() as group:
        async for work in works:
            group.create_task(work)
            count += 1
    return count


async def _queued_work(
    controller_span: ControllerSpan, perform: RunBatch
) -> AsyncIterator[Coroutine[object, object, None]]:
    while (request := await controller_span.requests.get()) is not None:
        yield request.run(perform)


async def _received_work(open_run: OpenRun, perform: RunBatch) -> AsyncIterator[Coroutine[object, object, None]]:
    """Yield a coroutine for each work request that arrives from the process that has locked the run. The coroutine does
    the requested work. Results that are stored already are not computed again."""

    async def carry_out(batch: str, shards: Shards) -> None:
        await perform(batch, shards)
        await open_run.wait_for_commits()

    async for message in read_messages(open_run.run, messages_folder(open_run.run, str(flow_run.id))):
        yield carry_out(message.batch, message.shards)


def controller_name() -> str:
    """Return the display name of the current flow run, for `flow_run_name`: `rollout 0`, `rollout 0 from it-0051` if it
    replaces an earlier flow run, or `it-0003 rollout 0` if it processes a single batch."""
    parameters = flow_run.parameters
    first = parameters.get("first", 1)
    later = f"from {iteration_key(first)}" if first > 1 else None
    parts = (parameters.get("batch"), flow_run.flow_name, parameters.get("controller"), later)
    return " ".join(str(part) for part in parts if part is not None)


async def run_on_controller(
    role: Role, open_run: OpenRun, *, batch: str, controller: int | None = None, shards: Shards = None
) -> None:
    """Send work on a batch to the controller of a role (a flow that passes the work on to workers), and wait until the
    work is done.

    `controller` is the number of the controller if several controllers share the batch. `shards` are the shards that it
    works on, by default all.
    """
    request = BatchRequest(batch, shards)
    _CONTROLLERS.get().send(role, controller, request)
    await request.done
