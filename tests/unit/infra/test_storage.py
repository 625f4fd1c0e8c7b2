"""The contract of stores, tested on every kind of store, and properties of the local disk."""

import os
import random
import resource
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import MemoryStore

from rheostat.infra.errors import BadInput, Damaged, StoreFailed
from rheostat.infra.store.bucket import Bucket
from rheostat.infra.store.bucket_store import BucketStore
from rheostat.infra.store.cache import open_cache
from rheostat.infra.store.contracts import Store, check_key
from rheostat.infra.store.local import LocalStore
from rheostat.infra.store.s3 import S3
from rheostat.infra.store.storage import open_store
from tests.support.jobs import wait_for
from tests.support.processes import CONTEXT, kill, preload, process
from tests.support.s3_servers import Place
from tests.support.stores import RacedStore

preload(__name__)


KINDS = [
    "path",
    "file_uri",
    pytest.param("moto", marks=pytest.mark.s3),
    pytest.param("rgw", marks=pytest.mark.s3),
    pytest.param("azurite", marks=pytest.mark.s3),
]


@dataclass(frozen=True)
class MemoryPlace(Place):
    """Bucket in the memory of this process, for requests through obstore without a server."""

    client: MemoryStore = field(default_factory=MemoryStore)

    def open(self) -> Store:
        os.environ.update(self.environment)
        return BucketStore(Bucket(self.uri, S3, "", self.client, self.client), open_cache(), self.lease_seconds)


def make_place(kind, tmp_path, s3_servers):
    """Return an empty store of a kind. Other kinds of stores are added to the tests here."""
    root = tmp_path / "a store"
    if kind == "memory":
        return MemoryPlace("memory://bucket", {"RHEOSTAT_CACHE": str(tmp_path / "cache")})
    if kind in ("path", "file_uri"):
        return Place(str(root) if kind == "path" else root.as_uri())
    return s3_servers.start(kind).place()


@pytest.fixture(params=["memory", *KINDS])
def place(request, tmp_path, s3_servers):
    """Empty store."""
    return make_place(request.param, tmp_path, s3_servers)


@pytest.fixture(params=KINDS)
def shared_place(request, tmp_path, s3_servers):
    """Empty store that other processes can open too."""
    return make_place(request.param, tmp_path, s3_servers)


@pytest.fixture
def uri(tmp_path):
    """Address of an empty store on disk."""
    return str(tmp_path / "a store")


def test_an_object_reads_back_as_it_was_written_from_bytes_or_a_file(place, tmp_path):
    store = place.open()
    source = tmp_path / "source"
    source.write_bytes(bytes(range(256)) * 10_000)
    assert store.put("a/bytes", b"\0payload") and store.put("a/file", source)
    assert store.read("a/bytes") == b"\0payload"
    assert store.read("a/file") == source.read_bytes() == store.local_path("a/file").read_bytes()
    assert store.find("a/file") == source.read_bytes() and store.find("a/none") is None


def test_an_empty_object_reads_back_as_an_empty_file(shared_place):
    store = shared_place.open()
    assert store.put("a/empty", b"")
    assert store.local_path("a/empty").read_bytes() == store.read("a/empty") == b""


@pytest.mark.parametrize("durable", [True, False])
def test_a_link_in_a_scratch_directory_becomes_no_object(uri, tmp_path, durable):
    (tmp_path / "elsewhere").write_bytes(b"of somebody else")
    store = open_store(uri)
    with store.scratch() as scratch, pytest.raises(StoreFailed, match="cannot write 'name'"):
        (scratch / "file").symlink_to(tmp_path / "elsewhere")
        store.put("name", scratch / "file", durable=durable)
    assert not store.exists("name")


def test_the_first_object_under_a_name_stays_until_it_is_deleted(place):
    store = place.open()
    assert store.put("a/name", b"first")
    assert not store.put("a/name", b"second") and not store.put("a/name", b"first")
    assert store.read("a/name") == b"first"
    store.delete("a/name")
    store.delete("a/name")
    assert not store.exists("a/name") and store.entries("") == []
    assert store.put("a/name", b"second") and store.read("a/name") == b"second"


def test_a_missing_object_is_damage_that_names_it(place):
    store = place.open()
    for read in (store.read, store.local_path, store.locate):
        with pytest.raises(Damaged, match=r"shards/none\.arrow"):
            read("shards/none.arrow")
    assert not store.exists("shards/none.arrow")


def test_an_object_that_is_deleted_before_its_file_is_opened_is_missing(tmp_path):
    store = LocalStore(tmp_path)
    raced = RacedStore(tmp_path, act=store.delete)
    store.put("orders/1", b"an order")
    assert raced.find("orders/1") is None
    store.put("orders/1", b"an order")
    with pytest.raises(Damaged, match="'orders/1' is missing"):
        raced.read("orders/1")


def test_a_directory_that_is_deleted_while_its_store_is_in_use_is_not_created_again(uri):
    open_store(uri).put("run.json", b"{}")
    store = open_store(uri)
    store.delete("run.json")
    assert store.put("run.json", b"{}"), "an empty directory is still there"
    shutil.rmtree(store.root)
    for write in (
        lambda: store.put("report/curve.png", b"png"),
        lambda: store.put("run.json", b"{}"),
        lambda: store.lock("lock").__enter__(),
        lambda: store.scratch().__enter__(),
    ):
        with pytest.raises(
            StoreFailed, match=f"the directory of the store was deleted while the store was in use: '{store.root}'"
        ):
            write()
    assert not store.root.exists()
    assert open_store(uri).put("run.json", b"{}"), "a new run may have the name"


def test_listings_are_recursive_sorted_and_by_prefix(place):
    store = place.open()
    for key in ("b/2", "a", "b/10", "b/deep/er/1", "bb/1"):
        store.put(key, key.encode())
    assert [entry.key for entry in store.entries("")] == ["a", "b/10", "b/2", "b/deep/er/1", "bb/1"]
    assert [entry.key for entry in store.entries("b/")] == ["b/10", "b/2", "b/deep/er/1"]
    assert [entry.key for entry in store.entries("b/1")] == ["b/10"]
    assert [entry.bytes for entry in store.entries("b/deep")] == [len("b/deep/er/1")]
    assert store.children("") == ["a", "b", "bb"]
    assert store.children("b") == ["10", "2", "deep"]
    assert store.entries("nothing/here/") == store.children("nothing") == []


def test_the_uri_of_a_store_opens_the_same_store_and_reading_creates_no_store(place, uri):
    assert open_store(uri).entries("") == open_store(uri).children("") == [] and not open_store(uri).exists("key")
    assert not Path(uri).exists()
    store = place.open()
    replace(place, uri=store.uri).open().put("name", b"payload")
    assert store.read("name") == b"payload"


@pytest.mark.parametrize(
    "bad", ["", "..", "a/../b", "/a", "a/", "a//b", ".tmp-1", "a/.hidden", "a\n", "a b", "a\0", "~"]
)
def test_a_key_that_could_leave_the_store_is_refused(place, bad):
    store = place.open()
    for use in (store.read, store.exists, store.delete, lambda key: store.put(key, b"")):
        with pytest.raises(BadInput, match="Keys are parts like"):
            use(bad)


@given(st.text(alphabet="ab./\\~-\n\0é", max_size=12))
def test_every_accepted_key_stays_inside_its_root(key):
    root = Path("/root/of/store")
    try:
        check_key(key)
    except BadInput:
        return
    assert Path(os.path.normpath(root / key)).is_relative_to(root) and os.path.normpath(root / key) == f"{root}/{key}"


def _race(place, number, start, results):
    store = place.open()
    wins = []
    for round_ in range(3):
        start.wait()
        wins.append(store.put(f"race/{round_}", str(number).encode() * 100_000))
    results.put((number, wins))


def test_exactly_one_of_sixteen_racing_processes_writes_each_name(shared_place):
    start, results = CONTEXT.Barrier(16), CONTEXT.Queue()
    racers = [CONTEXT.Process(target=_race, args=(shared_place, number, start, results)) for number in range(16)]
    try:
        for racer in racers:
            racer.start()
        outcomes = dict(results.get() for _ in racers)
    finally:
        for racer in racers:
            kill(racer)
    store = shared_place.open()
    for round_ in range(3):
        (winner,) = [number for number, wins in outcomes.items() if wins[round_]]
        assert store.read(f"race/{round_}") == str(winner).encode() * 100_000
    assert [entry.key for entry in store.entries("")] == [f"race/{round_}" for round_ in range(3)]


def test_exactly_one_of_eight_threads_writes_each_name_and_gets_the_lock(place):
    stores = [place.open() for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:
        wins = [list(threads.map(lambda store, name=name: store.put(name, b"x"), stores)) for name in "abc"]
        assert [sum(each) for each in wins] == [1, 1, 1]

        def lock(store):
            with store.lock("lock") as held:
                together.wait(60)
                return held is not None

        together = threading.Barrier(8)
        assert sum(threads.map(lock, stores)) == 1


def _write_for_ever(place, attempt, ready):
    store = place.open()
    store.put(f"ready/{attempt}", b"")
    ready.set()
    for number in range(1_000_000):
        data = os.urandom(3_000_000)
        store.put(f"shards/{attempt}-{number}-{blake3(data).hexdigest()}", data)


def test_every_listed_object_is_complete_after_its_writer_was_killed_in_the_middle_of_a_put(shared_place):
    delays, store = random.Random(0), shared_place.open()
    for attempt in range(10):
        ready = CONTEXT.Event()
        with process(_write_for_ever, shared_place, attempt, ready):
            assert ready.wait()
            time.sleep(delays.uniform(0, 0.05))
    for entry in store.entries("shards/"):
        assert entry.bytes == 3_000_000 and blake3(store.read(entry.key)).hexdigest() == entry.key.rpartition("-")[2]


def _stop_in_the_middle_of_a_put(uri, source):
    open_store(uri).put("far/down/whole", Path(source))


def test_files_of_a_dead_writer_are_swept_and_files_of_a_live_one_are_not(tmp_path):
    # A named pipe as the source stops the writer in the middle of its put.
    pipes = [tmp_path / "dead", tmp_path / "live"]
    for pipe in pipes:
        os.mkfifo(pipe)
    root = tmp_path / "store"
    with (
        process(_stop_in_the_middle_of_a_put, str(root), str(pipes[0])) as dead,
        process(_stop_in_the_middle_of_a_put, str(root), str(pipes[1])) as live,
    ):
        streams = [pipe.open("wb", buffering=0) for pipe in pipes]
        for stream in streams:
            stream.write(b"half")
        kill(dead)
        assert len(list(root.glob(".tmp-*"))) == 2 and open_store(str(root)).entries("") == []
        with open_store(str(root)).lock("lock") as held:
            assert held and len(list(root.glob(".tmp-*"))) == 1
        for stream in streams:
            stream.close()
        live.join()
    assert open_store(str(root)).read("far/down/whole") == b"half" and not list(root.glob(".tmp-*"))


def test_taking_the_lock_lists_no_subfolder(tmp_path, monkeypatch):
    store = open_store(str(tmp_path))
    store.put("it-0001/rollout/0001.json", b"")
    looked = []
    monkeypatch.setattr(os, "scandir", lambda path, scan=os.scandir: looked.append(str(path)) or scan(path))
    with store.lock("lock") as held:
        assert held
    assert set(looked) <= {str(tmp_path)}


def test_deleting_the_last_object_of_a_folder_deletes_the_folder(tmp_path):
    store = open_store(str(tmp_path))
    for key in ("policies/a/config.json", "policies/a/deep/weights", "policies/b/config.json"):
        store.put(key, b"x")
    for key in ("policies/a/deep/weights", "policies/a/config.json", "policies/a/config.json"):
        store.delete(key)
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == [
        "policies", "policies/b", "policies/b/config.json",
    ]  # fmt: skip
    assert store.put("policies/a/config.json", b"again") and store.read("policies/a/config.json") == b"again"


def test_an_object_that_another_process_deletes_at_once_counts_as_written(tmp_path, monkeypatch):
    store, link = open_store(str(tmp_path)), os.link

    def taken(source, target):
        link(source, target)
        store.delete("orders/1/a")

    monkeypatch.setattr(os, "link", taken)
    assert store.put("orders/1/a", b"a")
    assert not (tmp_path / "orders").exists()


def test_a_folder_that_is_deleted_during_a_write_is_created_again(tmp_path, monkeypatch):
    store = open_store(str(tmp_path))
    store.put("policies/a/old", b"x")
    link, calls = os.link, []

    def delete_first(source, target):
        if not calls:
            calls.append(target)
            store.delete("policies/a/old")
        link(source, target)

    monkeypatch.setattr(os, "link", delete_first)
    assert store.put("policies/a/new", b"y") and store.read("policies/a/new") == b"y"
    assert calls and not list(tmp_path.glob(".tmp-*"))


def _stay_in_a_scratch_directory(uri, ready):
    with open_store(uri).scratch() as scratch:
        (scratch / "deep").mkdir()
        (scratch / "deep" / "weights").write_bytes(b"large")
        ready.set()
        time.sleep(600)


def test_a_scratch_directory_is_not_listed_and_is_deleted_by_its_process_or_the_next_lock(uri):
    store, dead, live = open_store(uri), CONTEXT.Event(), CONTEXT.Event()
    root = Path(store.root)
    with store.scratch() as scratch:
        (scratch / "weights").write_bytes(b"large")
        assert scratch.stat().st_mode & 0o777 == 0o700
        assert store.entries("") == store.children("") == []
        assert store.put("weights", scratch / "weights")
    assert [path.name for path in root.iterdir()] == ["weights"]
    with (
        process(_stay_in_a_scratch_directory, uri, dead) as killed,
        process(_stay_in_a_scratch_directory, uri, live),
    ):
        assert dead.wait() and live.wait()
        kill(killed)
        assert len(list(root.glob(".tmp-*/deep/weights"))) == 2 and store.children("") == ["weights"]
        with store.lock("lock") as held:
            assert held and len(list(root.glob(".tmp-*/deep/weights"))) == 1
    with store.lock("lock"):
        assert not list(root.glob(".tmp-*"))


def _put_with_little_space(uri, limit, results):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        open_store(uri).put("shards/big", bytes(10 * limit))
    except StoreFailed as error:
        results.put(str(error))


def test_a_failed_write_raises_store_failed_and_leaves_nothing(tmp_path):
    results = CONTEXT.Queue()
    with process(_put_with_little_space, str(tmp_path), 100_000, results):
        assert "cannot write 'shards/big'" in results.get()
    assert open_store(str(tmp_path)).entries("") == [] and not list(tmp_path.rglob(".tmp-*"))
    assert open_store(str(tmp_path)).put("shards/big", bytes(1_000_000))


def _hold(place, ready):
    with place.open().lock("lock") as held:
        assert held
        ready.set()
        time.sleep(600)


def test_a_lock_is_refused_while_its_holder_lives_and_every_process_can_read_its_state(shared_place):
    ready, store = CONTEXT.Event(), shared_place.open()
    assert store.lock_state("lock").state == "free"
    with process(_hold, shared_place, ready) as holder:
        assert ready.wait()
        with store.lock("lock") as lock:
            assert lock is None
        assert str(holder.pid).encode() in store.read("lock")
        status = store.lock_state("lock")
        assert status.state == "held" and status.who.startswith(f"process {holder.pid} on ")
    assert wait_for(lambda: store.lock_state("lock").state == "left")
    assert store.lock_state("lock").who == status.who
    with store.lock("lock") as lock, shared_place.open().lock("lock") as second:
        assert lock is not None and second is None
        assert store.lock_state("lock").state == "held"
        lock.check()
    assert store.lock_state("lock").state == "free"
    with store.lock("lock") as again:
        assert again is not None


def _hold_and_fork(place, results):
    with place.open().lock("lock"):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.write(writing, b"forked")
            time.sleep(600)
        os.read(reading, 6)  # the child runs: its copies are closed
        results.put(child)
        time.sleep(600)


def test_a_forked_child_that_outlives_the_holder_does_not_keep_the_lock(shared_place):
    results = CONTEXT.Queue()
    with process(_hold_and_fork, shared_place, results):
        child = results.get(timeout=250)
    try:
        os.kill(child, 0)
        with shared_place.open().lock("lock") as held:
            assert held
    finally:
        os.kill(child, signal.SIGKILL)
