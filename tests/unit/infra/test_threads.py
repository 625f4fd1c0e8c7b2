"""The cluster of threads: the contract of pools, without processes."""

import asyncio
import os
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from rheostat.infra.errors import BadInput, Damaged, WorkerFailed
from rheostat.infra.pools.host import Host, store_variables
from rheostat.infra.pools.launcher import SlotCount
from rheostat.infra.pools.threads import ThreadCluster
from rheostat.infra.pools.worker import PoolSpec
from tests.support.fleet_workers import Served

COUNTING = "tests.support.workers:Counting"


@pytest.fixture
async def cluster():
    async with ThreadCluster.open(threads=1) as opened:
        yield opened


@pytest.fixture
async def fleet(cluster, tmp_path):
    """Fleet with one slot, for a worker of `rollout` or `judge`."""
    specs = [spec("rollout", tmp_path), spec("judge", tmp_path)]
    return await cluster.fleet(specs, slots=SlotCount(1))


SERVED = {"rollout": Served("policy"), "judge": Served("judge")}


async def test_each_worker_does_one_piece_of_work_after_another(cluster):
    pool = await cluster.pool(PoolSpec("echo", COUNTING, {"start": 3}, size=2))
    works = [pool.run("echo", number, returns=int) for number in range(8)]
    done = await asyncio.gather(*works)
    assert [one.result for one in done] == list(range(8))
    assert {one.worker for one in done} == {"echo-0-0", "echo-1-0"}
    totals = await asyncio.gather(*(pool.run("total", None, returns=int) for _ in range(2)))
    assert sum(one.result for one in totals) == 8 + 2 * 3


async def test_progress_of_a_worker_is_read_while_it_works(cluster):
    pool = await cluster.pool(PoolSpec("slow", COUNTING, stall_seconds=1.0))
    done = await pool.run("slow_but_steady", 1.5, returns=int)
    assert done.result > 0


async def test_rheostat_errors_keep_their_type_and_other_errors_include_their_traceback(cluster):
    pool = await cluster.pool(PoolSpec("faulty", COUNTING))
    with pytest.raises(Damaged, match="shard 7 is torn"):
        await pool.run("raise_damaged", 7, returns=int)
    with pytest.raises(WorkerFailed, match=r"faulty\.raise_value_error raised ValueError: cannot digest 7") as raised:
        await pool.run("raise_value_error", 7, returns=int)
    assert "in raise_value_error" in raised.value.__notes__[0]
    assert (await pool.run("echo", 1, returns=int)).result == 1
    with pytest.raises(WorkerFailed, match="no weights at nowhere"):
        await cluster.pool(PoolSpec("unbuildable", "tests.support.workers:Unbuildable", {"path": "nowhere"}))


@pytest.mark.parametrize(("shares_gpu", "releases"), [(True, 2), (False, 0)])
async def test_a_worker_that_shares_a_gpu_releases_memory_after_each_method_also_after_an_error(
    cluster, shares_gpu, releases
):
    spec = PoolSpec("releasing", "tests.support.workers:ReleasingMemory", shares_gpu=shares_gpu)
    pool = await cluster.pool(spec)
    assert (await pool.run("count_releases", False, returns=int)).result == 0
    with pytest.raises(Damaged):
        await pool.run("count_releases", True, returns=int)
    assert (await pool.run("count_releases", False, returns=int)).result == releases


async def test_a_stalled_worker_is_reported_and_neither_replaced_nor_awaited(tmp_path):
    async with ThreadCluster.open(threads=1) as cluster:
        pool = await cluster.pool(PoolSpec("stuck", COUNTING, stall_seconds=0.2))
        with pytest.raises(WorkerFailed, match=r"stuck\.hang_once .* A thread cannot be killed"):
            await pool.run("hang_once", tmp_path / "hung", returns=int)
        assert pool.restarts == 0


async def test_a_worker_that_is_busy_when_the_cluster_closes_ends_its_work_first(tmp_path):
    async with ThreadCluster.open(threads=1) as cluster:
        fleet = await cluster.fleet([spec("rollout", tmp_path)], slots=SlotCount(1))
        await fleet.arrange({"rollout": 1}, take={"rollout": Served("v1")})
        working = asyncio.create_task(fleet.role("rollout").run("work", ("late", 0.2), returns=tuple))
        while not (tmp_path / "begun-late").exists():
            await asyncio.sleep(0.005)
        working.cancel()
        with suppress(asyncio.CancelledError):
            await working
    assert (tmp_path / "done").read_text().startswith("rollout late")
    assert not any(thread.name.startswith("rollout-") for thread in threading.enumerate())


def spec(role, home):
    (home / "awake").mkdir(exist_ok=True)
    return PoolSpec(role, "tests.support.fleet_workers:Turning", {"role": role, "home": home})


async def test_a_slot_changes_roles_by_sleep_and_wake_and_every_move_is_reported(fleet, tmp_path):
    moves = [
        (move.before, move.after, move.how)
        for workers in ({"rollout": 1}, {"judge": 1}, {"rollout": 1}, {})
        for move in await fleet.arrange(workers, take=SERVED)
    ]
    assert moves == [
        (None, "rollout", "start"),
        ("rollout", "judge", "start"),
        ("judge", "rollout", "wake"),
        ("rollout", None, "sleep"),
    ]
    assert not list((tmp_path / "awake").iterdir())


async def test_a_worker_that_cannot_load_its_model_leaves_the_slot_unchanged(fleet, tmp_path):
    await fleet.arrange({"rollout": 1}, take=SERVED)
    (tmp_path / "fail-judge-take").touch()
    with pytest.raises(WorkerFailed, match=r"judge cannot take\. No other judge worker is available"):
        await fleet.arrange({"judge": 1}, take=SERVED)
    assert fleet.allocation() == {"rollout": (0,), "judge": ()}


async def test_a_cluster_of_threads_refuses_more_than_one_rank(cluster):
    ranks = await cluster.ranks(PoolSpec("update", "tests.support.workers:Ring"))
    assert (await ranks.run("fail_on_one", None, returns=tuple)).result[0] == 0
    with pytest.raises(BadInput, match=r"pools\.update_ranks is 2"):
        await cluster.ranks(PoolSpec("pair", "tests.support.workers:Ring", size=2))


async def test_workers_get_their_environment_variables_and_those_of_the_process_do_not_change(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    for threads in (3, 1):
        async with ThreadCluster.open(threads=threads) as cluster:
            pool = await cluster.pool(PoolSpec("worker", COUNTING))
            names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
            variables = (await pool.run("environment", names, returns=dict)).result
            assert variables == {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    assert os.environ["OMP_NUM_THREADS"] == "7"


def test_threads_need_no_ray():
    program = "import sys, rheostat.infra.pools.threads, rheostat.tasks.run.open_run; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_remote_worker_uses_only_its_controllers_store_keys_and_keeps_its_local_cache(monkeypatch):
    def found_with(**variables: str) -> dict[str, str]:
        for name in store_variables():
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return store_variables()

    ours = {"AWS_ACCESS_KEY_ID": "ours", "AZURE_STORAGE_ACCOUNT_NAME": "ours"}
    local = {"AWS_WEB_IDENTITY_TOKEN_FILE": "/a/file", "AZURE_FEDERATED_TOKEN_FILE": "/a/file"}
    told = found_with(**ours, **local, RHEOSTAT_CACHE="/here")
    assert told == ours | {"RHEOSTAT_CACHE": "/here"}
    own = found_with(AWS_SESSION_TOKEN="theirs", AZURE_STORAGE_SAS_TOKEN="theirs", RHEOSTAT_CACHE="/there")
    for variables, found in (({}, own), (told, told | {"RHEOSTAT_CACHE": "/there"})):
        Host().construct(COUNTING, {}, variables)
        assert store_variables() == found
