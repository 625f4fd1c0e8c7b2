"""The store in S3 on bad days: what is lost, doubled, cut or late between it and real servers, and who may commit."""

import os
import signal
import time
from dataclasses import replace
from datetime import timedelta

import pytest

from infra.errors import BadInput, Fenced, StoreFailed
from infra.store.bucket import Patience
from infra.store.manifests import Manifest
from infra.store.runs import Run, RunRecord
from tests.support.processes import CONTEXT, kill, preload, process
from tests.support.s3_proxy import Fault, s3_proxy

preload(__name__)

pytestmark = pytest.mark.s3

SHORT = Patience(answer_seconds=1, total_seconds=2)


@pytest.fixture(params=["moto", "rgw"])
def server(request, s3_servers):
    return s3_servers.start(request.param)


@pytest.fixture
def far(server):
    """A store behind a proxy, and the proxy's weather."""
    with s3_proxy(server.endpoint) as (endpoint, weather):
        yield server.place(endpoint=endpoint), weather


@pytest.mark.parametrize("fault", ["lost answer", "500 after", "duplicate"])
def test_a_put_that_is_done_and_not_acknowledged_has_won_and_is_not_taken_for_anothers(far, fault):
    place, weather = far
    store = place.open()
    store.put("warm", b"")
    weather.faults = [Fault(fault, "^PUT", times=2)]
    assert store.put("name", b"mine")
    assert not store.put("name", b"mine") and not store.put("name", b"another's")
    assert store.read("name") == b"mine"


@pytest.mark.parametrize("fault", ["500", "503", "cut answer", "cut request", "lost answer", "slow"])
def test_whatever_passes_is_waited_for_and_nothing_is_torn(far, fault, tmp_path):
    place, weather = far
    store = replace(place, patience=replace(place.patience, answer_seconds=1)).open()
    data, source = os.urandom(2_000_000), tmp_path / "source"
    source.write_bytes(data)
    store.put("warm", b"")
    weather.faults = [
        Fault(fault, f"^{method} .*{what}", times=1) for method in ("PUT", "GET", "HEAD") for what in "ab"
    ]
    assert store.put("shards/a", data) and store.put("shards/b", source)
    assert store.read("shards/a") == data == store.local("shards/b").read_bytes()
    weather.faults = [Fault(fault, "list-type", times=1)]
    assert [(entry.key, entry.bytes) for entry in store.entries("shards/")] == [
        ("shards/a", len(data)),
        ("shards/b", len(data)),
    ]


def test_a_server_that_stays_away_is_a_named_error_that_says_what_was_tried_and_how_long(far):
    place, weather = far
    store = replace(place, patience=SHORT).open()
    store.put("warm", b"")
    for kind in ("503", "slow"):
        weather.faults = [Fault(kind)]
        with pytest.raises(StoreFailed, match=rf"{store.uri}: cannot read 'warm': asked \d+ times in \d+\.\d s: .*"):
            store.read("warm")
        with pytest.raises(StoreFailed, match=r"cannot write 'new': asked \d+ times in"):
            store.put("new", b"")


def test_who_is_refused_is_told_and_does_not_ask_again(far):
    place, weather = far
    store = place.open()
    store.put("warm", b"")
    weather.seen.clear()
    weather.faults = [Fault("403")]
    for use in (store.read, store.exists, store.delete, lambda key: store.put(key, b"")):
        with pytest.raises(StoreFailed, match=r"asked 1 time in .*403"):
            use("warm")
    assert len(weather.seen) == 4


@pytest.mark.parametrize(
    ("header", "reason"),
    [("if-none-match", "of 4 writers of one free name 4 won"), ("if-match", "did not stop a write")],
)
def test_a_server_without_conditional_puts_is_refused_before_anything_is_written(s3_servers, header, reason):
    with s3_proxy(s3_servers.start("moto").endpoint) as (endpoint, weather):  # Ceph's checks that all headers arrive
        weather.deaf_to = (header,)
        store = s3_servers.start("moto").place(endpoint=endpoint).open()
        with pytest.raises(BadInput, match=f"honours conditional puts, found that .*{reason}"):
            store.put("run.json", b"{}")
        with pytest.raises(BadInput, match="conditional puts"), store.hold("lock"):
            pass
        assert store.entries("") == []


def _write_all(place, number, names, start, results):
    store = place.open()
    start.wait()
    results.put((number, [store.put(f"race/{name}", f"{number}".encode() * 50_000) for name in range(names)]))


@pytest.mark.parametrize("seed", [1])
def test_on_a_bad_day_each_name_has_one_winner_who_knows_it(far, seed):
    place, weather = far
    place.open().put("warm", b"")
    weather.seed, weather.share = seed, 0.3
    names, racers = 12, 4
    start, results = CONTEXT.Barrier(racers), CONTEXT.Queue()
    children = [CONTEXT.Process(target=_write_all, args=(place, each, names, start, results)) for each in range(racers)]
    try:
        for child in children:
            child.start()
        outcomes = dict(results.get(timeout=200) for _ in children)
    finally:
        for child in children:
            kill(child)
    weather.share = 0
    store = place.open()
    for name in range(names):
        (winner,) = [number for number, wins in outcomes.items() if wins[name]]
        assert store.read(f"race/{name}") == f"{winner}".encode() * 50_000
    assert len(store.entries("race/")) == names


def _run(place):
    record = RunRecord(name="first", fingerprint="0" * 16, config={}, created="", versions={})
    return Run(place.open(), record)


def _drive(place, line):
    with _run(place).hold() as run:
        line.send(run.epoch)
        number = 0
        try:
            while True:
                run.commit(Manifest(key=f"epoch-{run.epoch}/{number:06d}"))
                number += 1
                time.sleep(0.02)
        except Fenced as error:
            line.send(str(error))
    line.send("over")


def test_a_stopped_driver_is_relieved_and_commits_nothing_when_it_wakes(server):
    place = server.place()
    near, far_end = CONTEXT.Pipe()
    with process(_drive, place, far_end) as first:
        assert near.recv() == 1
        os.kill(first.pid, signal.SIGSTOP)
        with _run(place).hold() as run:
            assert run.epoch == 2
            before = {manifest.key for manifest in run.manifests("epoch-1/")}
            os.kill(first.pid, signal.SIGCONT)
            assert "has lost its lease" in near.recv() and near.recv() == "over"
            assert {manifest.key for manifest in run.manifests("epoch-1/")} == before
            run.commit(Manifest(key="epoch-2/last"))


@pytest.mark.parametrize("ahead", [timedelta(hours=1), timedelta(hours=-1)])
def test_a_clock_that_is_wrong_by_an_hour_changes_nothing(far, ahead):
    place, weather = far
    weather.clock = ahead
    near, far_end = CONTEXT.Pipe()
    with process(_drive, place, far_end) as first:
        assert near.recv() == 1
        time.sleep(2 * place.lease_seconds)
        with _run(place).store.hold("lock") as held:
            assert held is None
        kill(first)
        with _run(place).hold() as run:
            assert run.epoch == 2


def test_a_driver_that_cannot_renew_its_lease_knows_it_before_another_takes_it(server):
    with s3_proxy(server.endpoint) as (endpoint, weather):
        place = server.place()
        behind = replace(place, environment={**place.environment, "AWS_ENDPOINT_URL": endpoint}, patience=SHORT)
        with behind.open().hold("lock") as lease:
            weather.faults = [Fault("503", "PUT .*lock")]
            lease.check()
            with place.open().hold("lock") as taken:
                assert taken is not None
                with pytest.raises(Fenced, match="was not renewed for 3 s"):
                    lease.check()
                weather.faults = []
                time.sleep(place.lease_seconds)
                with pytest.raises(Fenced, match="another has taken it"):
                    lease.check()
                taken.check()


def test_a_lease_outlives_lost_answers(far):
    place, weather = far
    store = place.open()
    with store.hold("lock") as lease:
        weather.faults = [Fault("lost answer", "PUT .*lock", times=3), Fault("500 after", "PUT .*lock", times=2)]
        time.sleep(2 * place.lease_seconds)
        lease.check()
        assert not any(fault.times for fault in weather.faults)
