"""Works of one stage side by side, and waits for what other controllers commit."""

import asyncio

import pytest

from infra.errors import BadInput, WorkerLost, WorkerStalled
from infra.pools.threads import ThreadCluster
from infra.store.manifests import Manifest, provenance_here
from infra.store.runs import create_run, open_run
from tasks.config.run import RunConfig
from tasks.run.session import Session
from tasks.run.stages import committed, record, side_by_side


@pytest.fixture
def session(tmp_path):
    """An open run with a silence of 0.3 s."""
    config = RunConfig.model_validate(
        {"scoring": {"rewards": [{"kind": "numeric"}]}, "controllers": {"silence_seconds": 0.3}}
    )
    run = create_run(str(tmp_path), "run", {})
    with run.hold():
        yield Session(run, config, ThreadCluster(), store=str(tmp_path))


async def test_a_lost_worker_lets_the_other_works_finish_and_is_then_told():
    done = []

    async def work(number):
        if number == 1:
            raise WorkerLost("a worker")
        await asyncio.sleep(0.05)
        done.append(number)

    with pytest.raises(WorkerLost):
        await side_by_side(work(number) for number in range(4))
    assert done == [0, 2, 3]


async def test_what_trying_again_cannot_help_ends_the_others_at_once():
    ended = []

    async def work(number):
        if number == 1:
            raise BadInput("no number")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(number)

    with pytest.raises(BadInput):
        await side_by_side(work(number) for number in range(3))
    assert sorted(ended) == [0, 2]


async def test_who_stops_waiting_for_works_ends_them():
    ended = []

    async def work(number):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(number)

    works = asyncio.ensure_future(side_by_side(work(number) for number in range(2)))
    await asyncio.sleep(0.01)
    works.cancel()
    with pytest.raises(asyncio.CancelledError):
        await works
    assert sorted(ended) == [0, 1]


async def test_a_commit_of_this_process_wakes_who_waits_for_it(session, monkeypatch):
    monkeypatch.setattr("tasks.run.stages.LOOK_SECONDS", {"nested": (1000, 1000)})  # nobody looks again by itself
    session.commits.newest += 1000
    waiting = [asyncio.ensure_future(committed(session, "it-0001/plan")) for _ in range(2)]
    await asyncio.sleep(0.05)
    made = record(session, "it-0001/plan")
    async with asyncio.timeout(60):
        assert [await found for found in waiting] == [made, made]


async def test_a_commit_of_another_process_is_found(session, tmp_path):
    waiting = asyncio.ensure_future(committed(session, "it-0001/plan"))
    await asyncio.sleep(0.05)
    other = open_run(str(tmp_path), "run").join(session.run.epoch)
    made = other.commit(Manifest(key="it-0001/plan", provenance=provenance_here(worker="another")))
    assert (await waiting).digest == made.digest


async def test_silence_begins_anew_with_every_commit_and_its_end_is_named(session):
    waiting = asyncio.ensure_future(committed(session, "it-0001/plan"))
    session.commits.newest += 1000
    await asyncio.sleep(0.6)
    assert not waiting.done()
    session.commits.newest -= 2000
    with pytest.raises(WorkerStalled, match=r"it-0001/plan: expected a commit within 0\.3 s, none came"):
        await waiting
