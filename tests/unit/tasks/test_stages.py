"""Concurrent work units of a stage, and waits for commits of other controllers."""

import asyncio

import pytest

from rheostat.infra.errors import BadInput, WorkerLost, WorkerStalled
from rheostat.infra.pools.threads import ThreadCluster
from rheostat.infra.store.manifests import Manifest, provenance_here
from rheostat.infra.store.runs import open_run
from rheostat.tasks.run.open_run import OpenRun
from rheostat.tasks.run.stages import commit_decision, run_concurrently, wait_for_manifest
from tests.support.configurations import accepted


@pytest.fixture
def opened(run, tmp_path):
    """Open run whose controllers may be silent for 0.3 s, after the 1,000 s in which nothing counts as silence."""
    opened = OpenRun(run, accepted("controllers.silence_seconds=0.3"), ThreadCluster(), store=str(tmp_path))
    opened.commits.last_commit_time += 1000
    return opened


async def test_after_a_lost_worker_the_other_work_units_finish_before_it_is_reported():
    done = []

    async def work(number):
        if number == 1:
            raise WorkerLost("a worker")
        await asyncio.sleep(0.05)
        done.append(number)

    with pytest.raises(WorkerLost):
        await run_concurrently(work(number) for number in range(4))
    assert done == [0, 2, 3]


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_an_error_that_a_retry_cannot_fix_or_a_cancellation_ends_the_other_work_units(is_cancelled):
    begun, ended, fail = [], [], asyncio.Event()

    async def work(number):
        if number == 1:
            await fail.wait()
            raise BadInput("no number")
        begun.append(number)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(number)

    works = asyncio.ensure_future(run_concurrently(work(number) for number in range(3)))
    while len(begun) < 2:
        await asyncio.sleep(0)
    _ = works.cancel() if is_cancelled else fail.set()
    with pytest.raises(asyncio.CancelledError if is_cancelled else BadInput):
        await works
    assert sorted(ended) == [0, 2]


async def test_a_commit_of_this_process_wakes_everything_that_waits_for_it(opened, monkeypatch):
    monkeypatch.setattr(
        "rheostat.tasks.run.stages.POLL_SECONDS", {"nested": (1000, 1000)}
    )  # nobody looks again by itself
    waiting = [asyncio.ensure_future(wait_for_manifest(opened, "it-0001/plan")) for _ in range(2)]
    await asyncio.sleep(0.05)
    made = commit_decision(opened, "it-0001/plan")
    async with asyncio.timeout(60):
        assert [await found for found in waiting] == [made, made]


async def test_a_commit_of_another_process_is_found(opened, tmp_path):
    waiting = asyncio.ensure_future(wait_for_manifest(opened, "it-0001/plan"))
    await asyncio.sleep(0.05)
    other = open_run(str(tmp_path), "r").join(opened.run.epoch)
    made = other.commit(Manifest(key="it-0001/plan", provenance=provenance_here(worker="another")))
    assert (await waiting).digest == made.digest


async def test_every_commit_restarts_the_limit_on_silence_and_the_limit_is_reported(opened):
    waiting = asyncio.ensure_future(wait_for_manifest(opened, "it-0001/plan"))
    await asyncio.sleep(0.6)
    assert not waiting.done()
    opened.commits.last_commit_time -= 2000
    with pytest.raises(WorkerStalled, match=r"it-0001/plan.* 0\.3 s"):
        await waiting
