"""Controllers in other processes, seen from the driver of a run. A flow run is a task of this process here."""

import asyncio
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from uuid import uuid4

import pytest
from prefect.states import Cancelled, Completed, Crashed, Failed

from rheostat.flows import deployed_controllers
from rheostat.flows.deployed_controllers import DeployedController
from rheostat.infra.errors import WorkerFailed, WorkerLost
from rheostat.infra.store.manifests import Manifest, provenance_here
from rheostat.infra.store.runs import create_run, open_run
from rheostat.tasks.config.run import RunConfig
from rheostat.tasks.run import work_queue
from rheostat.tasks.run.keys import StageKey
from rheostat.tasks.run.work_queue import BatchRequest, ControllerSpan, messages_folder, read_messages
from tests.support.demos import ARITHMETIC

REWARDS = {"rewards": [{"kind": "numeric"}]}


class Starter:
    """Starter that runs tasks instead of Prefect's processes. Each task has a function that handles its orders."""

    def __init__(self, tmp_path, held, bodies):
        self._home, self._held, self._bodies = tmp_path, held, iter(bodies)
        self.begun, self.started, self.cancelled, self._ends = [], [], [], {}

    @asynccontextmanager
    async def start(self, deployment, parameters, *, tag):
        child = SimpleNamespace(id=uuid4(), name=deployment, state=None)
        joined = open_run(str(self._home), tag).join(self._held.epoch)
        self.begun.append(parameters["first"])
        self.started.append(child.id)
        running = asyncio.ensure_future(self._run(child, joined, next(self._bodies)))
        try:
            yield child
        finally:
            if child.id not in self._ends:
                self.cancelled.append(child.id)
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    async def find_ended(self, child):
        return self._ends.get(child.id)

    async def _run(self, child, run, body):
        child.state = await body(run, read_messages(run, messages_folder(run, child.id)))
        self._ends[child.id] = child


def commit(run, batch, shard):
    run.commit(Manifest(key=StageKey.of(batch, "rollout", shard), provenance=provenance_here()))


async def obey(run, asked, batches=None):
    """Carry out all orders, and add the batch of each order to `batches`."""
    async for message in asked:
        if batches is not None:
            batches.append(message.batch)
        for shard in message.shards:
            commit(run, message.batch, shard)
    return Completed()


def until(batch, shards, state):
    """Obey until this number of shards of a batch is committed, then end in a state."""

    async def body(run, asked):
        async for message in asked:
            for shard in message.shards:
                if message.batch == batch and shard >= shards:
                    return state
                commit(run, message.batch, shard)
        raise AssertionError(f"{batch} was never asked for")

    return body


async def sulk(run, asked):
    """Read the first order and nothing more."""
    await anext(asked)
    await asyncio.Event().wait()


@pytest.fixture
def held(tmp_path):
    run = create_run(str(tmp_path), "run", {})
    with run.lock():
        yield run


@pytest.fixture
def serve(tmp_path, held):
    """Order three iterations of rollouts from a controller whose flow runs execute these functions."""

    async def serve(*bodies, **controllers):
        config = RunConfig.model_validate({"data": ARITHMETIC, "scoring": REWARDS, "controllers": controllers})
        opened = SimpleNamespace(run=held, settings=config, ref=None, get_controller_pools=lambda role: ())
        starter, controller_span = Starter(tmp_path, held, bodies), ControllerSpan(1, 3)
        controller = DeployedController("rollout", opened, 0, controller_span=controller_span, flow_runs=starter)
        asked = [BatchRequest(f"it-{number:04d}", (0, 1, 2)) for number in (1, 2, 3)]

        async def ask():
            for order in asked:
                controller_span.requests.put_nowait(order)
                await order.done
            controller_span.requests.put_nowait(None)

        async with asyncio.timeout(60):
            asking = asyncio.ensure_future(ask())
            try:
                await controller.serve()
                await asking
            finally:
                asking.cancel()
        return starter

    return serve


def rollouts(run):
    return [manifest.key for manifest in run.manifests() if "rollout" in manifest.key]


async def test_one_flow_run_serves_a_span_of_iterations(held, serve):
    starter = await serve(obey)
    assert (starter.begun, starter.cancelled, len(rollouts(held))) == ([1], [], 9)
    assert held.store.entries("orders/") == []


async def test_a_successor_of_a_crashed_controller_gets_the_unfinished_messages(held, serve):
    batches = []
    crash = until("it-0002", 1, Crashed(message="SIGKILL"))
    starter = await serve(crash, lambda run, asked: obey(run, asked, batches))
    assert (starter.begun, batches, len(rollouts(held))) == ([1, 2], ["it-0002", "it-0003"], 9)


async def test_controllers_that_crash_repeatedly_without_progress_end_the_run(held, serve):
    crash = until("it-0001", 0, Crashed(message="out of memory"))
    with pytest.raises(WorkerLost, match=r"Crashed: out of memory.*lost 4 times"):
        await serve(*[crash] * 9)


async def test_controllers_that_crash_after_some_progress_are_replaced_without_a_limit(held, serve):
    crash = Crashed(message="SIGKILL")
    bodies = [until(f"it-{number:04d}", shards, crash) for number in (1, 2, 3) for shards in (1, 2)]
    starter = await serve(*bodies, obey)
    assert (len(starter.begun), len(rollouts(held))) == (7, 9)


@pytest.mark.parametrize("state", [Failed(message="planted"), Cancelled(message="planted")])
async def test_a_controller_that_fails_or_is_cancelled_ends_the_run_with_its_message(held, serve, state):
    with pytest.raises(WorkerFailed, match=f"{state.name}: planted"):
        await serve(until("it-0002", 1, state))


async def test_a_controller_that_stops_reading_messages_is_cancelled_and_replaced(held, serve, monkeypatch):
    for module in (work_queue, deployed_controllers):
        monkeypatch.setattr(module, "MAX_SILENT_SECONDS", 0.3)
    monkeypatch.setattr(work_queue, "HEARTBEAT_SECONDS", 0.05)
    starter = await serve(sulk, *[obey] * 99)  # on a busy machine any successor may be silent for too long as well
    assert starter.cancelled[0] == starter.started[0]
    assert len(starter.started) >= 2
    assert len(rollouts(held)) == 9


async def test_a_controller_that_is_never_started_ends_the_run(held, serve):
    async def wait(run, asked):
        await asyncio.Event().wait()

    with pytest.raises(WorkerFailed, match=r"not started within 0\.2 s"):
        await serve(wait, silence_seconds=0.2)
