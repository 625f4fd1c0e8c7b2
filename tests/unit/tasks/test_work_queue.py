"""Messages between the driver of a run and a controller in another process."""

import asyncio

import pytest

from rheostat.infra.errors import Fenced, HolderLost
from rheostat.infra.store.runs import create_run, open_run
from rheostat.tasks.run import work_queue
from rheostat.tasks.run.work_queue import (
    ControllerMessage,
    Outbox,
    delete_old_messages,
    messages_folder,
    pause_seconds,
    read_messages,
)

HERE = ControllerMessage(kind="word")
END = ControllerMessage(kind="end")


def order(batch):
    return ControllerMessage(kind="order", batch=batch, shards=(0, 2))


@pytest.fixture
def joined(run, tmp_path):
    """The same run, joined by another process."""
    return open_run(str(tmp_path), "r").join(run.epoch)


async def read(run, folder):
    return [message async for message in read_messages(run, folder)]


def left(run):
    return [entry.key for entry in run.store.entries("orders/")]


async def test_messages_are_read_once_in_their_order_and_deleted(run, joined):
    folder = messages_folder(run, "one")
    outbox = Outbox(run, folder)
    reading = asyncio.ensure_future(read(joined, folder))
    for message in (order("it-0001"), HERE, order("it-0002"), END):
        outbox.put(message)
        await asyncio.sleep(0.01)
    async with asyncio.timeout(60):
        assert await reading == [order("it-0001"), order("it-0002")]
    outbox.check()
    assert (outbox.num_unread, left(run)) == (0, [])


async def test_each_flow_run_gets_only_the_messages_for_it(run, joined):
    one, other = (messages_folder(run, name) for name in ("one", "other"))
    Outbox(run, one).put(order("it-0001"))
    outbox = Outbox(run, other)
    outbox.put(order("it-0002"))
    outbox.put(END)
    assert await read(joined, other) == [order("it-0002")]
    delete_old_messages(run)
    assert left(run) == []


async def test_a_controller_of_an_epoch_that_is_over_is_fenced(tmp_path, monkeypatch):
    monkeypatch.setattr(work_queue, "LEASE_CHECK_SECONDS", 0.01)
    run = create_run(str(tmp_path), "r", {})
    with run.lock():
        old = open_run(str(tmp_path), "r").join(run.epoch)
        folder = messages_folder(run, "one")
    with (
        run.lock(),
        pytest.raises(Fenced, match=r"epoch 1 of this process is over, because another process has locked the run"),
    ):
        async with asyncio.timeout(60):
            await read(old, folder)


async def test_a_controller_fails_if_its_driver_stays_silent(run, joined, monkeypatch):
    monkeypatch.setattr(work_queue, "MAX_SILENT_SECONDS", 0.1)
    with pytest.raises(HolderLost, match=r"\(epoch 1\) sent no message for"):
        async with asyncio.timeout(60):
            await read(joined, messages_folder(run, "one"))


async def test_a_driver_without_messages_keeps_a_controller_waiting(run, joined, monkeypatch):
    monkeypatch.setattr(work_queue, "HEARTBEAT_SECONDS", 0.05)
    folder = messages_folder(run, "one")
    outbox = Outbox(run, folder)
    monkeypatch.setattr(work_queue, "MAX_SILENT_SECONDS", 10.0)
    reading = asyncio.ensure_future(read(joined, folder))
    while outbox._written < 3:
        await asyncio.sleep(0.02)
        outbox.check()
    assert not reading.done()
    outbox.put(END)
    async with asyncio.timeout(60):
        assert await reading == []
    monkeypatch.setattr(work_queue, "HEARTBEAT_SECONDS", 0.0)
    outbox.check()
    assert left(run) == []  # nothing more is written after the end


def test_a_driver_detects_whether_its_messages_are_read(run):
    outbox = Outbox(run, messages_folder(run, "one"))
    outbox.put(order("it-0001"))
    outbox.put(order("it-0002"))
    outbox.check()
    assert (outbox.num_unread, outbox.has_begun) == (2, False)
    run.store.delete(left(run)[0])
    outbox.check()
    assert (outbox.num_unread, outbox.has_begun) == (1, True)
    outbox.close()
    assert left(run) == []


def test_the_pause_between_two_polls_grows_up_to_a_second():
    assert [pause_seconds(waited) for waited in (0, 1, 5, 60)] == [0.02, 0.1, 0.5, 1.0]
