"""Runs: one controller at a time, one result per manifest key, and errors instead of mixed results."""

import gc
import os
import shutil
import signal
import time
import weakref

import pyarrow as pa
import pytest

import rheostat.infra.store.runs
from rheostat.infra.errors import BadInput, Conflict, Damaged, Fenced, RunChanged, RunLocked
from rheostat.infra.store.checksums import seal, unseal
from rheostat.infra.store.local import LocalStore
from rheostat.infra.store.manifests import Manifest, Provenance
from rheostat.infra.store.runs import create_run, list_runs, open_run
from rheostat.infra.store.shards import ShardRef, write_shard
from tests.support.processes import CONTEXT, kill, preload, process

preload(__name__)

CONFIG = {"name": "first", "update": {"learning_rate": 1e-6, "zero": {"stage": 0}}, "rewards": ["numeric"]}


def make(root, name="first", config=CONFIG):
    return create_run(str(root), name, config)


def test_a_run_is_created_once_opened_by_name_and_listed(tmp_path):
    run = make(tmp_path)
    assert make(tmp_path).record == open_run(str(tmp_path), "first").record == run.record
    assert run.record.config == CONFIG and run.record.versions["pyarrow"] == pa.__version__
    assert [entry.key for entry in run.store.entries("")] == ["run.json"]
    make(tmp_path, "a.1")
    (tmp_path / "no-run").mkdir()
    (tmp_path / "file").write_bytes(b"")
    assert list_runs(str(tmp_path)) == list_runs(tmp_path.as_uri()) == ["a.1", "first"]
    assert list_runs(str(tmp_path / "nowhere")) == []
    with pytest.raises(BadInput, match=r"'gone'.*: a.1, first"):
        open_run(str(tmp_path), "gone")


@pytest.mark.parametrize("name", ["", "A", ".", "..", "a..b", "-a", "a/b", "../a", "a b", "a\n", "a" * 65, "s3://a"])
def test_a_run_name_that_is_not_safe_is_bad_input_that_states_the_rule(tmp_path, name):
    for use in (lambda: make(tmp_path, name), lambda: open_run(str(tmp_path), name)):
        with pytest.raises(BadInput, match="up to 64 characters"):
            use()
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_results_accepts_another_configuration_and_drops_old_dependencies(tmp_path):
    with make(tmp_path).lock() as run:
        run.write_entry("dependencies/0001", {"iteration": 1})
        with pytest.raises(RunLocked):
            make(tmp_path, config=CONFIG | {"extra": True})
    again = make(tmp_path, config=CONFIG | {"extra": True})
    assert open_run(str(tmp_path), "first").record == again.record and again.record.config["extra"] is True
    assert again.journal() == {}
    with again.lock():
        assert again.epoch == 3, "epochs of the earlier configuration stay over"


@pytest.mark.parametrize("key", ["shards/ab/left.arrow", "journal/placement/it-0001/plan.json", "chain/000001-it.json"])
def test_a_run_with_lost_manifests_does_not_accept_another_configuration(tmp_path, key):
    make(tmp_path).store.put(key, b"")
    with pytest.raises(RunChanged):
        make(tmp_path, config=CONFIG | {"extra": True})


def test_another_configuration_is_refused_with_the_keys_and_values_that_differ(tmp_path):
    with make(tmp_path).lock() as run:
        run.commit(Manifest(key="policy/base"))
    with pytest.raises(RunChanged) as caught:
        make(tmp_path, config=CONFIG | {"update": {"learning_rate": 2e-6, "zero": {"stage": 2}}, "extra": True})
    parts = (
        "update.learning_rate was 1e-06, is 2e-06",
        "update.zero.stage was 0, is 2",
        "extra was absent, is true",
        "choose another name",
    )
    assert all(part in str(caught.value) for part in parts) and "rewards" not in str(caught.value)


def test_an_edited_configuration_or_fingerprint_is_damage_even_with_a_valid_seal(tmp_path):
    path = make(tmp_path).store.local_path("run.json")
    whole = unseal(path.read_bytes(), where="run.json")
    for edited in ({**whole, "fingerprint": "0" * 16}, {**whole, "config": {**CONFIG, "rewards": ["mathematics"]}}):
        path.write_bytes(seal(edited))
        for use in (lambda: open_run(str(tmp_path), "first"), lambda: make(tmp_path)):
            with pytest.raises(Damaged, match="fingerprint"):
                use()
    path.write_bytes(seal(whole).replace(b"1e-06", b"1e-05"))
    with pytest.raises(Damaged, match="run 'first'"):
        open_run(str(tmp_path), "first")


def test_a_replaced_run_record_does_not_accept_existing_manifests(tmp_path):
    with make(tmp_path).lock() as run:
        run.commit(Manifest(key="policy/base"))
    run.store.local_path("run.json").unlink()
    for config in (CONFIG, CONFIG | {"rewards": ["mathematics"]}):
        with pytest.raises(Damaged, match=r"run\.json is missing"):
            make(tmp_path, config=config)
    make(tmp_path, "other", CONFIG | {"rewards": ["mathematics"]})
    (tmp_path / "first/run.json").write_bytes((tmp_path / "other/run.json").read_bytes())
    with pytest.raises(Damaged, match=r"'policy/base'.* created by a configuration"):
        open_run(str(tmp_path), "first").require("policy/base")


def test_a_manifest_with_stored_shards_is_committed_and_visible_to_all_processes(tmp_path):
    with make(tmp_path).lock() as run:
        shard = write_shard(run.store, pa.table({"a": [1]}), kind="test", metadata={})
        missing = ShardRef(key="shards/00.arrow", bytes=1, rows=1, digest="00")
        with pytest.raises(Damaged, match=r"'it-0001/rollout/0000'.*shards/00\.arrow"):
            run.commit(Manifest(key="it-0001/rollout/0000", shards=(missing,)))
        assert run.manifests() == [] and run.find("it-0001/rollout/0000") is None
        committed = run.commit(Manifest(key="it-0001/rollout/0000", shards=(shard,), metrics={"x": 1.0}))
        run.commit(Manifest(key="it-0001/scoring/0000"))
        run.commit(Manifest(key="it-0002/rollout/0000"))
    reader = open_run(str(tmp_path), "first")
    assert reader.find("it-0001/rollout/0000") == committed == run.find("it-0001/rollout/0000")
    assert committed.provenance.epoch == 1 and committed.provenance.host
    keys = [manifest.key for manifest in reader.manifests("it-0001/")]
    assert keys == ["it-0001/rollout/0000", "it-0001/scoring/0000"]
    assert len(reader.manifests()) == 3 and reader.manifests("it-0003/") == []


def test_an_expected_manifest_is_visible_only_in_its_process_and_commits_after_its_parents(tmp_path):
    with make(tmp_path).lock() as run:
        parent = run.add_pending(Manifest(key="it-0001/update"))
        child = run.add_pending(Manifest(key="it-0002/plan", parents=(parent.digest,)))
        assert [run.find(made.key) for made in (parent, child)] == run.pending_manifests() == [parent, child]
        elsewhere = open_run(str(tmp_path), "first")
        assert run.has(parent.key) and not elsewhere.has(parent.key) and run.manifests() == []
        assert run.has_pending([parent.digest]) and not run.has_pending(["another"])
        with pytest.raises(AssertionError, match="committed after its parents"):
            run.commit(child)
        assert [run.commit(made).digest for made in (parent, child)] == [parent.digest, child.digest]
        assert not run.pending_manifests() and elsewhere.find(child.key) == run.find(child.key)


def test_a_second_equal_result_returns_the_first_and_a_different_one_is_a_conflict(tmp_path):
    """The result is committed again, as after a lost acknowledgement, or when one attempt runs twice."""
    with make(tmp_path).lock() as run:
        first = run.commit(Manifest(key="a", metrics={"x": 1.0}, provenance=Provenance(worker="first")))
        for again in (run, run.join(run.epoch)):
            assert again.commit(Manifest(key="a", metrics={"x": 1.0}, provenance=Provenance(worker="second"))) == first
        other = Manifest(key="a", metrics={"x": 2.0}, run=run.record.fingerprint)
        with pytest.raises(Conflict, match=rf"'a'.*{first.digest}.*{other.digest}"):
            run.commit(other)
    assert open_run(str(tmp_path), "first").find("a") == first and first.provenance.worker == "first"


def _commit_at_once(uri, epoch, number, start, results):
    run = open_run(uri, "first").join(epoch)
    start.wait()
    manifest = Manifest(key="it-0001/rollout/0000", metrics={"x": 1.0}, provenance=Provenance(worker=str(number)))
    results.put(run.commit(manifest).provenance.worker)


def test_eight_processes_that_commit_one_attempt_at_once_store_one_manifest(tmp_path):
    start, results = CONTEXT.Barrier(8), CONTEXT.Queue()
    with make(tmp_path).lock() as run:
        arguments = [(str(tmp_path), run.epoch, number, start, results) for number in range(8)]
        racers = [CONTEXT.Process(target=_commit_at_once, args=each) for each in arguments]
        try:
            for racer in racers:
                racer.start()
            winners = {results.get() for _ in racers}
        finally:
            for racer in racers:
                kill(racer)
    (manifest,) = open_run(str(tmp_path), "first").manifests()
    assert winners == {manifest.provenance.worker}


@pytest.fixture
def reads(monkeypatch):
    """Keys that stores on disk have read, in order."""
    keys = []
    monkeypatch.setattr(LocalStore, "find", lambda self, key, find=LocalStore.find: keys.append(key) or find(self, key))
    return keys


def test_a_sole_committer_does_not_query_the_store_for_missing_manifests(tmp_path, reads):
    with make(tmp_path).lock() as run:
        run.commit(Manifest(key="it-0001/rollout/0000"))
    again = open_run(str(tmp_path), "first")
    keys = [f"it-0001/rollout/{number:04d}" for number in range(3)]
    with again.lock(sole_writer=True):
        reads.clear()
        assert [again.find(key) is None for key in keys] == [again.has(key) is False for key in keys]
        assert again.has(keys[0]) and not again.has(keys[1])
        made = again.commit(Manifest(key=keys[1]))
        assert again.find(keys[1]) == made and again.has(keys[1])
        assert reads == [f"manifests/{keys[0]}.json"]
        other = open_run(str(tmp_path), "first").join(again.epoch)  # whom nobody expected
        assert again.commit(Manifest(key=keys[2])).digest == other.commit(Manifest(key=keys[2])).digest
    reads.clear()
    assert again.find("it-0001/plan") is None and len(reads) == 1


def test_a_run_open_for_reading_cannot_commit(tmp_path):
    run = make(tmp_path)
    with pytest.raises(BadInput, match="open for reading"):
        run.commit(Manifest(key="a"))
    with run.lock():
        run.commit(Manifest(key="a"))
    with pytest.raises(BadInput, match="open for reading"):
        run.commit(Manifest(key="b"))


def test_a_controller_of_an_older_epoch_is_fenced(tmp_path):
    with make(tmp_path).lock() as run:
        stale = run.join(run.epoch)
        stale.commit(Manifest(key="a"))
    with open_run(str(tmp_path), "first").lock() as newer:
        assert newer.epoch == 2
        with pytest.raises(Fenced, match="epoch 1 of this process is over, because another process has locked the run"):
            stale.commit(Manifest(key="b"))
        assert newer.find("b") is None and newer.find("a") is not None


def test_a_controller_of_a_deleted_run_is_fenced_with_an_error_that_names_the_deletion(tmp_path):
    with make(tmp_path).lock() as run:
        shutil.rmtree(tmp_path / "first")
        with pytest.raises(Fenced, match="epoch 1 of this process is over, because the run was deleted"):
            run.commit(Manifest(key="a"))


def test_an_epoch_can_be_joined_once_begun_and_ignores_clocks_and_foreign_files(tmp_path):
    run = make(tmp_path)
    for epoch in (1, 2, 3):
        with run.lock():
            assert run.epoch == epoch
            for other in (-1, 0, epoch + 1):
                with pytest.raises(BadInput, match=f"are 1 to {epoch}"):
                    run.join(other)
            os.utime(run.store.local_path(f"lease/{epoch:06d}.json"), (2**33 - 3600 * epoch, 2**33 - 3600 * epoch))
            for name in ("note.json", "12.json", "000007.json~"):
                (tmp_path / "first" / "lease" / name).write_text("mine")
            run.commit(Manifest(key=f"it/{epoch:04d}"))


def _control(uri, ready):
    with open_run(uri, "first").lock() as run:
        run.commit(Manifest(key=f"epoch-{run.epoch}"))
        ready.set()
        for number in range(1_000_000):
            run.commit(Manifest(key=f"epoch-{run.epoch}/step-{number}"))
            time.sleep(0.01)


def test_a_run_locked_by_a_live_or_stopped_process_is_refused_until_the_process_is_killed(tmp_path):
    run = make(tmp_path)
    ready = CONTEXT.Event()
    with process(_control, str(tmp_path), ready) as holder:
        assert ready.wait()
        for stop in (signal.SIGCONT, signal.SIGSTOP):
            os.kill(holder.pid, stop)
            with pytest.raises(RunLocked, match=f"'first'.*process {holder.pid} on "), run.lock():
                pass
    with run.lock():
        assert run.epoch == 2 and run.find("epoch-1") is not None
        run.commit(Manifest(key="epoch-2"))


def test_only_one_of_two_open_runs_in_a_process_can_lock_the_directory(tmp_path):
    first, second = make(tmp_path), make(tmp_path)
    with first.lock(), pytest.raises(RunLocked, match=f"process {os.getpid()}"), second.lock():
        pass
    with second.lock():
        assert second.epoch == 2 and first.epoch == 0


def _join(uri, epoch, line):
    run = open_run(uri, "first").join(epoch)
    run.commit(Manifest(key="before"))
    line.send("ready")
    line.recv()
    try:
        line.send(run.commit(Manifest(key="after")).key)
    except Fenced as error:
        line.send(str(error))


def test_a_stopped_controller_that_continues_after_a_takeover_commits_nothing(tmp_path):
    run = make(tmp_path)
    line, far_end = CONTEXT.Pipe()
    with run.lock():
        epoch = run.epoch
    with process(_join, str(tmp_path), epoch, far_end) as stopped:
        assert line.recv() == "ready"
        os.kill(stopped.pid, signal.SIGSTOP)
        with run.lock():
            line.send("proceed")
            os.kill(stopped.pid, signal.SIGCONT)
            assert "epoch 1 of this process is over, because another process has locked the run" in line.recv()
            assert run.find("after") is None and run.find("before") is not None


@pytest.mark.thorough
def test_each_of_thousands_of_manifests_is_read_once(tmp_path, reads):
    with make(tmp_path).lock() as run:
        run.commit(Manifest(key="it/0000"))
        folder = run.store.local_path("manifests/it/0000.json").parent
        for number in range(2000):  # straight to the files: 2000 commits are 4000 fsyncs
            (folder / f"{number:04d}.json").write_bytes(Manifest(key=f"it/{number:04d}").encode())
    reader = open_run(str(tmp_path), "first")
    reads.clear()
    assert len(reader.manifests()) == len(reader.manifests("it/")) == 2000
    assert len(reads) == len({*reads}) == 2000


@pytest.mark.parametrize("name", ["lock", "lease", "manifests", "journal"])
def test_nothing_is_written_through_a_symbolic_link_inside_a_run(tmp_path, name):
    run, outside = make(tmp_path / "store"), tmp_path / "outside"
    if name == "lock":
        outside.write_bytes(b"precious")
    else:
        outside.mkdir()
    (tmp_path / "store" / "first" / name).symlink_to(outside)
    with pytest.raises(BadInput, match=rf"symbolic link .*/first/{name}\. Remove the link"), run.lock() as held:
        held.write_entry("key", {"seconds": 1})
        held.commit(Manifest(key="it/0000"))
    assert outside.read_bytes() == b"precious" if name == "lock" else not list(outside.iterdir())


def test_a_store_and_a_run_may_be_links_themselves(tmp_path):
    make(tmp_path / "disk", "first")
    (tmp_path / "store").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "second").symlink_to(tmp_path / "disk" / "first")
    for name in ("first", "second"):
        with open_run(str(tmp_path / "store"), name).lock() as run:
            assert run.write_entry(name, {"seconds": 1}) == run.find_entry(name) == {"seconds": 1}


def test_a_process_caches_a_bounded_number_of_manifests_and_finds_all(tmp_path, monkeypatch):
    monkeypatch.setattr(rheostat.infra.store.runs, "KNOWN_MANIFESTS", 3)
    keys = [f"it-{number:04d}/credit" for number in range(1, 11)]
    run = make(tmp_path)
    with run.lock():
        made = [run.commit(Manifest(key=key, metrics={"number": number})) for number, key in enumerate(keys)]
        digests, alive = [manifest.digest for manifest in made], [weakref.ref(manifest) for manifest in made]
        del made
        gc.collect()
        assert sum(remembered() is not None for remembered in alive) == 3
        assert [run.require(key).digest for key in keys] == digests
        assert [manifest.digest for manifest in run.manifests()] == digests
        assert run.require(keys[-1]) is run.find(keys[-1])
