"""Role controllers: sub-flows that take orders for a span of iterations, or runs of their deployments that do."""

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

from flows.deployed import DeployedController, FlowRuns, flow_runs
from infra.errors import first_cause
from tasks.run.keys import StageKey, iteration_key
from tasks.run.orders import BatchOrder, Perform, Shards, Tenure, letters, orders_folder, sweep_orders
from tasks.run.session import RunRef, Session

Role = Flow[Concatenate[RunRef, ...], Coroutine[object, object, int | State[int]]]
"""A role's flow: with a batch it works on that one, without it serves a run."""


class Controllers:
    """The controllers of an open run; each starts with its first order and has a successor after a span of iterations.

    Flow runs are what costs Prefect most: there is one for each role and slice, not one for each batch as well.
    """

    def __init__(self, group: asyncio.TaskGroup, session: Session, *, deployed: FlowRuns | None) -> None:
        self._group, self._session, self._deployed = group, session, deployed
        self._around = contextvars.copy_context()
        """Of the flow that holds the run, whose sub-flows they are, whoever asks first."""
        self._serving: dict[tuple[str, int | None], Tenure] = {}

    def ask(self, role: Role, number: int | None, order: BatchOrder) -> None:
        """Hand an order to a controller, of several to that of a number; after its span begin its successor."""
        place, iteration = (role.name, number), StageKey.of(order.batch, "plan").after
        serving, span = self._serving.get(place), self._session.settings.controllers.span
        if serving is None or serving.last < iteration:
            if serving is not None:
                serving.orders.put_nowait(None)
            last = span * max(1, ceil(iteration / span))
            serving = self._serving[place] = Tenure(last - span + 1, last)
            around = self._around.copy()
            around.run(_TENURE.set, serving)
            self._group.create_task(self._controller(role, number, serving), context=around)
        serving.orders.put_nowait(order)

    def close(self) -> None:
        """Let them end when they have done what they were asked."""
        for serving in self._serving.values():
            serving.orders.put_nowait(None)

    async def _controller(self, role: Role, number: int | None, tenure: Tenure) -> None:
        if self._deployed is not None:
            await DeployedController(role.name, self._session, number, tenure=tenure, started=self._deployed).serve()
            return
        share = {} if number is None else {"controller": number}
        with tags(role.name):
            await role(self._session.ref, first=tenure.first, **share)


_CONTROLLERS: contextvars.ContextVar[Controllers] = contextvars.ContextVar("controllers")
_TENURE: contextvars.ContextVar[Tenure] = contextvars.ContextVar("tenure")


@asynccontextmanager
async def controllers(session: Session) -> AsyncIterator[None]:
    """Keep the controllers of a run that this flow holds. What one of them raises ends the others and the flow."""
    try:
        async with AsyncExitStack() as stack:
            deployed = None
            sweep_orders(session.run)
            if session.settings.controllers.where == "deployment":
                deployed = await stack.enter_async_context(flow_runs())
            async with asyncio.TaskGroup() as group:
                before = _CONTROLLERS.set(opened := Controllers(group, session, deployed=deployed))
                try:
                    yield
                finally:
                    _CONTROLLERS.reset(before)
                    opened.close()
    except BaseExceptionGroup as several:
        raise first_cause(several) from several


async def serve(session: Session, perform: Perform) -> int:
    """Carry out the orders of a controller until its time is over; return how many."""
    count, tenure = 0, _TENURE.get(None)
    works = _posted(session, perform) if tenure is None else _asked(tenure, perform)
    async with asyncio.TaskGroup() as group:
        async for work in works:
            group.create_task(work)
            count += 1
    return count


async def _asked(tenure: Tenure, perform: Perform) -> AsyncIterator[Coroutine[object, object, None]]:
    while (order := await tenure.orders.get()) is not None:
        yield order.carry_out(perform)


async def _posted(session: Session, perform: Perform) -> AsyncIterator[Coroutine[object, object, None]]:
    """What the holder asks of this process, which is a controller; it finds what is done in the store."""

    async def carry_out(batch: str, shards: Shards) -> None:
        await perform(batch, shards)
        await session.settled()

    async for letter in letters(session.run, orders_folder(session.run, str(flow_run.id))):
        yield carry_out(letter.batch, letter.shards)


def controller_name() -> str:
    """`rollout 0`, a successor's `rollout 0 from it-0051`, or `it-0003 rollout 0` of one batch; for `flow_run_name`."""
    parameters = flow_run.parameters
    first = parameters.get("first", 1)
    later = f"from {iteration_key(first)}" if first > 1 else None
    parts = (parameters.get("batch"), flow_run.flow_name, parameters.get("controller"), later)
    return " ".join(str(part) for part in parts if part is not None)


async def launch(
    role: Role, session: Session, *, batch: str, controller: int | None = None, shards: Shards = None
) -> None:
    """Have a role's controller work on a batch: a sub-flow of this run, or a run of its own deployment.

    `controller` is its number among peers that share the batch, `shards` its part.
    """
    order = BatchOrder(batch, shards)
    _CONTROLLERS.get().ask(role, controller, order)
    await order.done
