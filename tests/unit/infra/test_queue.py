"""The queue of a pool: requests are served in order, and no request is woken in vain."""

import asyncio

import pytest

from rheostat.infra.errors import ClusterFailed
from rheostat.infra.pools.host import ProcessPlace, Returned
from rheostat.infra.pools.pool import Pool
from rheostat.infra.pools.threads import ThreadCluster
from rheostat.infra.pools.worker import PoolSpec

COUNTING = "tests.support.workers:Counting"


class Gated:
    """Worker that ends each work when its gate opens. It starts itself."""

    name, is_owned, nodes = "gated-0-0", False, ()
    place = ProcessPlace(1, 0.0, node="here", host="here", address="127.0.0.1", job="here")

    def __init__(self) -> None:
        self.begun: list[object] = []
        self.gate = asyncio.Event()

    async def perform(self, method, *arguments, clock):
        self.begun += arguments
        await self.gate.wait()
        self.gate.clear()
        return Returned(arguments[0], 0.0)

    async def list_generations(self, role):
        return {}

    async def start(self, spec, name, *, slot):
        return self


@pytest.fixture
async def gated_pool():
    worker = Gated()
    pool = Pool(PoolSpec("gated", COUNTING), worker)
    await pool.open()
    yield pool, worker
    await pool.close()


def start_requests(pool, *works):
    return [asyncio.create_task(pool.run("echo", work, returns=int)) for work in works]


async def passes(count=5):
    for _ in range(count):
        await asyncio.sleep(0)


async def test_requests_are_served_in_the_order_in_which_they_arrive(gated_pool):
    pool, worker = gated_pool
    works = start_requests(pool, 0, 1, 2)
    await passes()
    assert (worker.begun, pool.waiting) == ([0], 2)
    late = []
    works[0].add_done_callback(lambda _: late.extend(start_requests(pool, 3)))
    for _ in range(3):
        worker.gate.set()
        await passes()
    assert worker.begun == [0, 1, 2, 3]
    worker.gate.set()
    assert [(await work).result for work in [*works, *late]] == [0, 1, 2, 3]


async def test_a_request_that_is_cancelled_while_it_waits_leaves_the_worker_to_the_next(gated_pool):
    pool, worker = gated_pool
    works = start_requests(pool, 0, 1, 2, 3)
    await passes()
    works[1].cancel()
    worker.gate.set()
    asyncio.get_running_loop().call_soon(works[2].cancel)  # just after the worker has been handed to it
    await passes(10)
    assert (worker.begun, pool.waiting) == ([0, 3], 0)
    assert works[1].cancelled() and works[2].cancelled()


async def test_everything_that_waits_for_a_pool_fails_when_the_pool_is_closed(gated_pool):
    pool, _ = gated_pool
    works = start_requests(pool, 0, 1, 2)
    await passes()
    await pool.close()
    for work in works:
        with pytest.raises(ClusterFailed, match=r"pool of gated workers (is|was) closed"):
            await work


async def test_a_worker_that_finishes_wakes_one_waiting_request_only(monkeypatch):
    async with ThreadCluster.open(threads=1) as cluster:
        pool = await cluster.pool(PoolSpec("echo", COUNTING, size=2))
        loop, callbacks = asyncio.get_running_loop(), 0
        original = loop.call_soon

        def counted(*arguments, **options):
            nonlocal callbacks
            callbacks += 1
            return original(*arguments, **options)

        monkeypatch.setattr(loop, "call_soon", counted)
        done = await asyncio.gather(*(pool.run("echo", number, returns=int) for number in range(300)))
        assert [one.result for one in done] == list(range(300))
        assert callbacks < 25 * 300
