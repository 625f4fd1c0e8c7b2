"""Controllers in separate processes. Each is a flow run of a Prefect deployment and serves work requests of the run's
holder (the process that has locked the run)."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from uuid import UUID

from prefect import get_client
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.deployments import arun_deployment
from prefect.states import Cancelling

from rheostat.infra.counts import format_count
from rheostat.infra.errors import WorkerFailed, WorkerLost
from rheostat.tasks.run.keys import StageKey
from rheostat.tasks.run.open_run import OpenRun
from rheostat.tasks.run.work_queue import (
    MAX_SILENT_SECONDS,
    BatchRequest,
    ControllerMessage,
    ControllerSpan,
    Outbox,
    messages_folder,
    pause_seconds,
)

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""Minimum interval in seconds between two queries to Prefect for controllers (flow runs of one role) that have ended.
One query covers all controllers."""
END_SECONDS = 60.0
"""Time limit in seconds for a controller (flow run of one role) to end after its last request is finished."""
CANCEL_SECONDS = 10.0
"""Time limit in seconds for the requests to Prefect's API that cancel a flow run."""

FINAL_STATES = (StateType.COMPLETED, StateType.FAILED, StateType.CRASHED, StateType.CANCELLED)


@dataclass(slots=True)
class FlowRuns:
    """Flow runs that this process has started in Prefect as controllers (each performs one role), and the final states
    of the flow runs that have ended."""

    client: PrefectClient
    _open: set[UUID] = field(default_factory=set)
    _ended: dict[UUID, FlowRun] = field(default_factory=dict)
    _last_query: float = field(default_factory=time.monotonic)

    @asynccontextmanager
    async def start(self, deployment: str, parameters: dict[str, object], *, tag: str) -> AsyncIterator[FlowRun]:
        """Start a flow run of a Prefect deployment, and run the block. If the flow run has not ended when the block
        ends, it is canceled. Yields the flow run."""
        child = await arun_deployment(deployment, client=self.client, parameters=parameters, tags=[tag], timeout=0)
        self._open.add(child.id)
        try:
            yield child
        finally:
            self._open.discard(child.id)
            if self._ended.pop(child.id, None) is None:
                await self._cancel(child)

    async def find_ended(self, child: FlowRun) -> FlowRun | None:
        """Return the flow run `child` in its final state, or None if it has not ended. Calls within a short interval
        share one request to Prefect."""
        if time.monotonic() - self._last_query > POLL_SECONDS:
            self._last_query = time.monotonic()
            open_ids = FlowRunFilterId(any_=[*(self._open - self._ended.keys())])
            ends = FlowRunFilterState(type=FlowRunFilterStateType(any_=[*FINAL_STATES]))
            ended_runs = await self.client.read_flow_runs(flow_run_filter=FlowRunFilter(id=open_ids, state=ends))
            self._ended |= {run.id: run for run in ended_runs if run.id in self._open}
        return self._ended.get(child.id)

    async def _cancel(self, child: FlowRun) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_SECONDS):
                state = (await self.client.read_flow_run(child.id)).state
                if state is None or not state.is_final():
                    await self.client.set_flow_run_state(child.id, Cancelling())


@asynccontextmanager
async def connect_to_prefect() -> AsyncIterator[FlowRuns]:
    """Connect to Prefect's API during the block. Yields an object that starts flow runs of deployments and queries
    their states."""
    async with get_client() as client:
        yield FlowRuns(client)


@dataclass(slots=True)
class _OpenRequest:
    """Work request that is not finished. `missing` lists the keys of the results that are not stored yet, with the
    first missing result last."""

    request: BatchRequest
    missing: list[StageKey]


class DeployedController:
    """Handle of a controller (a process that performs one role) that runs as a separate Prefect flow run. It sends
    requests to the flow run, checks that the flow run is alive, and replaces it if it is lost."""

    def __init__(
        self, role: str, open_run: OpenRun, number: int | None, *, controller_span: ControllerSpan, flow_runs: FlowRuns
    ) -> None:
        self._role, self._open_run, self._number = role, open_run, number
        self._span, self._started = controller_span, flow_runs
        self._open_requests: list[_OpenRequest] = []
        self._last_progress = time.monotonic()
        """Time of the last request or stored result, in seconds of the monotonic clock."""
        self._parts = 0
        """Number of times that new results were detected. If it grows, the flow run is making progress."""
        self._is_over = False
        """Whether the last request was passed on."""

    async def serve(self) -> None:
        """Pass work requests on to the flow run until the last request is finished. A lost flow run is replaced. Raises
        WorkerFailed if the flow run fails, and WorkerLost if too many flow runs in a row are lost."""
        lost_runs, progress, max_lost = 0, 0, self._open_run.settings.pools.max_restarts
        while self._open_requests or not self._is_over:
            try:
                await self._follow()
            except WorkerLost as lost:
                lost_runs, progress = 1 if self._parts > progress else lost_runs + 1, self._parts
                if lost_runs > max_lost:
                    raise WorkerLost(
                        f"{lost}. The controller was lost {format_count(lost_runs, 'time')} in a row, more than "
                        "pools.max_restarts allows. Start the run again to continue"
                    ) from lost
                logger.warning("%s. The controller was lost at attempt %d of %d.", lost, lost_runs, max_lost + 1)

    async def _follow(self) -> None:
        """Start one flow run of the controller, send it all open and new requests, and return when it has ended with
        all requests finished."""
        open_run = self._open_run
        for pool in open_run.get_controller_pools(self._role):  # started here: workers end with their parent
            await open_run.get_pool(pool)
        share = {} if self._number is None else {"controller": self._number}
        parameters: dict[str, object] = {"run": open_run.ref, "first": self._first_iteration(), **share}
        async with self._started.start(f"{self._role}/controller", parameters, tag=open_run.run.name) as child:
            outbox = Outbox(open_run.run, messages_folder(open_run.run, child.id))
            try:
                for open_request in self._open_requests:
                    outbox.put(_build_message(open_request.request))
                if self._is_over:
                    outbox.put(ControllerMessage(kind="end"))
                while not await self._has_ended(child, outbox):
                    self._check_commits()
                    await self._pass_on_request(outbox)
            finally:
                outbox.close()

    def _first_iteration(self) -> int:
        """Return the number of the first iteration with unfinished work. A new flow run of this controller starts with
        it."""
        return max(
            self._span.first, *(_iteration_of(open_request.request) for open_request in self._open_requests[:1]), 1
        )

    def _check_commits(self) -> None:
        """Look for new results in the store, and wake the tasks that wait for a request whose results are now
        complete."""
        for open_request in self._open_requests:
            before = len(open_request.missing)
            while open_request.missing and self._open_run.run.has(open_request.missing[-1]):
                open_request.missing.pop()
            if len(open_request.missing) < before:
                self._parts, self._last_progress = self._parts + 1, time.monotonic()
            if not open_request.missing:
                open_request.request.complete()
        self._open_requests = [open_request for open_request in self._open_requests if open_request.missing]

    async def _pass_on_request(self, outbox: Outbox) -> None:
        """Wait a short time for the next work request, and send it to the flow run if one arrives. If all requests were
        sent already, only wait."""
        waited = time.monotonic() - self._last_progress
        pause = min(pause_seconds(waited), POLL_SECONDS) if self._open_requests or self._is_over else POLL_SECONDS
        if self._is_over:
            await asyncio.sleep(pause)
            return
        with suppress(TimeoutError):
            request = await asyncio.wait_for(self._span.requests.get(), pause)
            self._last_progress = time.monotonic()
            if request is None:
                self._is_over = True
                outbox.put(ControllerMessage(kind="end"))
            else:
                self._open_requests.append(_OpenRequest(request, self._keys_of(request)))
                outbox.put(_build_message(request))

    def _keys_of(self, request: BatchRequest) -> list[StageKey]:
        """Return the keys of all results that a work request produces, with the first result last."""
        if request.shards is None:
            return [StageKey.of(request.batch, self._role)]
        return [StageKey.of(request.batch, self._role, shard) for shard in reversed(request.shards)]

    async def _has_ended(self, child: FlowRun, outbox: Outbox) -> bool:
        """Return whether the last request was sent, all requests are finished, and the flow run `child` has completed.

        Raises WorkerLost if the flow run is lost, WorkerFailed if it failed.
        """
        outbox.check()
        ended = await self._started.find_ended(child)
        if ended is None:
            self._check_alive(child, outbox)
            return False
        assert ended.state is not None
        self._check_commits()
        done = self._is_over and not self._open_requests
        if done and ended.state.is_completed():
            return True
        outcome = (
            f"controller {self._role}/controller ({ended.name}) ended as {ended.state.name}: {ended.state.message}"
        )
        raise WorkerLost(outcome) if ended.state.is_crashed() or ended.state.is_completed() else WorkerFailed(outcome)

    def _check_alive(self, child: FlowRun, outbox: Outbox) -> None:
        """Check that the flow run `child` of this controller is still working. `outbox` contains the messages to the
        flow run.

        Raises WorkerFailed if it does not start in time, WorkerLost if it no longer reads its requests or does not end.
        """
        label, silent_seconds = f"controller {self._role}/controller ({child.name})", outbox.silent_seconds
        start_seconds = self._open_run.settings.controllers.silence_seconds
        if outbox.num_unread and not outbox.has_begun and silent_seconds > start_seconds:
            raise WorkerFailed(
                f"{label} was not started within {start_seconds:g} s (controllers.silence_seconds). Check that a "
                "Prefect worker is running for its work pool."
            )
        if outbox.num_unread and outbox.has_begun and silent_seconds > MAX_SILENT_SECONDS:
            raise WorkerLost(f"{label} has not read its messages for {silent_seconds:.0f} s, so it has probably ended")
        if self._is_over and not (outbox.num_unread or self._open_requests) and silent_seconds > END_SECONDS:
            raise WorkerLost(f"{label} has not ended within {END_SECONDS:g} s. Cancel its flow run in Prefect's UI")


def _build_message(request: BatchRequest) -> ControllerMessage:
    return ControllerMessage(kind="order", batch=request.batch, shards=request.shards)


def _iteration_of(request: BatchRequest) -> int:
    return StageKey.of(request.batch, "plan").number
