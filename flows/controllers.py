"""Role controllers: sub-flows that take orders for a span of iterations, or runs of their own deployments."""

import asyncio
import contextvars
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import ceil
from typing import Concatenate

from prefect import get_client, tags
from prefect.client.schemas.objects import FlowRun
from prefect.deployments import arun_deployment
from prefect.flows import Flow
from prefect.runtime import flow_run
from prefect.states import Cancelling

from infra.errors import WorkerFailed, WorkerLost, first_cause
from tasks.run.keys import StageKey, iteration_key
from tasks.run.session import RunRef, Session

Role = Flow[Concatenate[RunRef, ...], Coroutine[object, object, int]]
"""A role's flow: with a batch it works on that one, without it serves a run."""

Shards = tuple[int, ...] | None

Perform = Callable[[str, Shards], Awaitable[object]]
"""What a controller does with a batch, or with some of its shards."""

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """What a controller is asked to do. Who stops waiting for it has it stopped."""

    batch: str
    shards: Shards
    done: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    async def carry_out(self, perform: Perform) -> None:
        """Do it, and tell who waits how it ended."""
        work = asyncio.ensure_future(perform(self.batch, self.shards))
        self.done.add_done_callback(lambda done: work.cancel() if done.cancelled() else None)
        try:
            await work
        except BaseException as error:
            if self.done.cancelled() and work.cancelled():
                return
            if not self.done.done():
                self.done.set_exception(error)
            raise
        if not self.done.done():
            self.done.set_result(None)


@dataclass(frozen=True, slots=True)
class Tenure:
    """A controller's time, and what it is asked to do until its end, which is told by None."""

    first: int
    """Number of the iteration that it begins with."""
    last: int
    """Number of the one after which a successor takes over."""
    orders: "asyncio.Queue[BatchOrder | None]" = field(default_factory=asyncio.Queue)


class Controllers:
    """The controllers of an open run; each starts with its first order and has a successor after a span of iterations.

    Sub-flows are what costs Prefect most: there is one for each role and slice, not one for each batch as well.
    """

    def __init__(self, group: asyncio.TaskGroup, *, span: int) -> None:
        self._group, self._span = group, span
        self._around = contextvars.copy_context()
        """Of the flow that holds the run, whose sub-flows they are, whoever asks first."""
        self._serving: dict[tuple[str, int], Tenure] = {}

    def ask(self, role: Role, run: RunRef, number: int | None, order: BatchOrder) -> None:
        """Hand an order to a controller, of several to that of a number; after its span begin its successor."""
        place, iteration = (role.name, number or 0), StageKey.of(order.batch, "plan").after
        serving = self._serving.get(place)
        if serving is None or serving.last < iteration:
            if serving is not None:
                serving.orders.put_nowait(None)
            last = self._span * max(1, ceil(iteration / self._span))
            serving = self._serving[place] = Tenure(last - self._span + 1, last)
            around = self._around.copy()
            around.run(_TENURE.set, serving)
            self._group.create_task(_nested(role, run, number), context=around)
        serving.orders.put_nowait(order)

    def close(self) -> None:
        """Let them end when they have done what they were asked."""
        for serving in self._serving.values():
            serving.orders.put_nowait(None)


_CONTROLLERS: contextvars.ContextVar[Controllers] = contextvars.ContextVar("controllers")
_TENURE: contextvars.ContextVar[Tenure] = contextvars.ContextVar("tenure")


@asynccontextmanager
async def controllers(*, span: int) -> AsyncIterator[None]:
    """Keep the controllers of a run that this flow holds. What one of them raises ends the others and the flow."""
    try:
        async with asyncio.TaskGroup() as group:
            before = _CONTROLLERS.set(opened := Controllers(group, span=span))
            try:
                yield
            finally:
                _CONTROLLERS.reset(before)
                opened.close()
    except BaseExceptionGroup as several:
        raise first_cause(several) from several


async def serve(perform: Perform) -> int:
    """Carry out the orders of a controller until its time is over; return how many."""
    count, orders = 0, _TENURE.get().orders
    async with asyncio.TaskGroup() as group:
        while (order := await orders.get()) is not None:
            group.create_task(order.carry_out(perform))
            count += 1
    return count


def controller_name() -> str:
    """`rollout 0`, a successor's `rollout 0 from it-0051`, or `it-0003 rollout 0` of one batch; for `flow_run_name`."""
    parameters, tenure = flow_run.parameters, _TENURE.get(None)
    later = f"from {iteration_key(tenure.first)}" if tenure is not None and tenure.first > 1 else None
    parts = (parameters.get("batch"), flow_run.flow_name, parameters.get("controller"), later)
    return " ".join(str(part) for part in parts if part is not None)


async def launch(
    role: Role, session: Session, *, batch: str, controller: int | None = None, shards: Shards = None
) -> None:
    """Have a role's controller work on a batch: a sub-flow of this run, or a run of its own deployment.

    `controller` is its number among peers that share the batch, `shards` its part.
    """
    if session.settings.controllers.where == "nested":
        order = BatchOrder(batch, shards)
        _CONTROLLERS.get().ask(role, session.ref, controller, order)
        await order.done
        return
    for pool in session.pools_of(role.name):  # workers end with the process that started them: this one starts them
        await session.ready(pool)
    share = {} if controller is None else {"controller": controller, "shards": shards}
    parameters: dict[str, object] = {"run": session.ref, "batch": batch, **share}
    name, attempts = f"{role.name}/controller", session.settings.pools.max_restarts + 1
    for attempt in range(1, attempts + 1):
        ended = await _deployed(name, parameters)
        assert ended.state is not None
        if ended.state.is_completed():
            return
        outcome = f"controller {name} ({ended.name}) ended as {ended.state.name}: {ended.state.message}"
        if not ended.state.is_crashed():
            raise WorkerFailed(outcome)
        logger.warning("%s; attempt %d of %d", outcome, attempt, attempts)
    raise WorkerLost(f"{outcome}; given up after attempt {attempts}")


async def _nested(role: Role, run: RunRef, number: int | None) -> None:
    with tags(role.name):
        await role(run, **({} if number is None else {"controller": number}))


async def _deployed(name: str, parameters: dict[str, object]) -> FlowRun:
    """Run a deployment to its end; who stops waiting for it stops it."""
    async with get_client() as client:
        child = await arun_deployment(name, client=client, parameters=parameters, timeout=0)
        try:
            while child.state is None or not child.state.is_final():
                await asyncio.sleep(POLL_SECONDS)
                child = await client.read_flow_run(child.id)
        except asyncio.CancelledError:
            await client.set_flow_run_state(child.id, Cancelling())
            raise
        return child
