"""Garbage collection deletes only files that no manifest names, also if processes are killed or write meanwhile."""

import os
import shutil
import signal
from datetime import timedelta
from itertools import count

import pytest

from rheostat.flows.cli.app import main
from rheostat.infra.errors import Damaged, Fenced, RunChanged, RunLocked
from rheostat.infra.store.bundles import fetch_bundle
from rheostat.infra.store.chain import Chain
from rheostat.infra.store.garbage import Rules, collect_garbage, delete_run, find_garbage, select_runs, tag_run
from rheostat.infra.store.local import LocalStore
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import create_run, open_run
from rheostat.infra.store.shards import read_shard, tombstone_key
from rheostat.infra.store.storage import open_store
from rheostat.infra.store.tombstones import Deleted, check_not_deleted, write_tombstone
from rheostat.infra.store.verify import verify_store
from tests.support.jobs import files_of
from tests.support.processes import preload, process
from tests.support.stores import flip_bit, publish_number_policy, write_number_shard

preload(__name__)


@pytest.fixture
def home(tmp_path):
    make(tmp_path / "runs", "r")
    return tmp_path / "runs"


def make(store, name, config=None):
    """Create a run with shards and policies: some of a manifest, some of an expected manifest, and garbage."""
    with create_run(str(store), name, config or {}).lock() as run:
        run.commit(parts(run, "it-0001/credit", 1))
        run.add_pending(parts(run, "it-0002/credit", 2))
        parts(run, "it-0003/credit", 3)
        run.store.put("orders/000001/some-controller/000000.json", b"{}")
        run.store.put("quarantine/0123456789abcdef-0123456789abcdef.arrow", b"torn")
        run.store.put("report/learning-curve-0001.png", b"png")
        run.store.put("export/it-0001.parquet", b"parquet")


def parts(run, key, number):
    """Return a manifest of a stored shard and a stored policy."""
    bundle = publish_number_policy(run, run.store.root.parent.parent / f"policy-{run.name}-{number}", number)
    return Manifest(key=key, shards=(write_number_shard(run, number),), bundles={"weights": bundle})


def collect(home, name="r"):
    with open_run(str(home), name).lock() as run:
        return collect_garbage(run)


def test_files_that_no_committed_or_expected_manifest_names_are_garbage(home):
    run = open_run(str(home), "r")
    before = files_of(home / "r")
    garbage = find_garbage(run)
    counts = {kind: len(entries) for kind, entries in garbage.items()}
    assert counts == {"orders": 1, "policies": 3, "quarantine": 1, "shards": 1}
    assert files_of(home / "r") == before, "to look for it deletes nothing"
    collect(home)
    gone = before.keys() - files_of(home / "r").keys()
    assert gone == {entry.key for entries in garbage.values() for entry in entries}
    assert find_garbage(run) == {} and verify_store(run) == []


def test_nothing_of_a_damaged_or_locked_run_is_deleted(home):
    before = {*files_of(home / "r")}
    with open_run(str(home), "r").lock(), pytest.raises(RunLocked):
        collect(home)
    flip_bit(home / "r/manifests/it-0001/credit.json")
    with pytest.raises(Damaged):
        collect(home)
    assert before <= {*files_of(home / "r")}


def test_collection_is_refused_if_manifests_of_an_unfinished_iteration_are_missing(home):
    with open_run(str(home), "r").lock() as run:
        run.commit(parts(run, "it-0003/plan", 3))
        run.write_entry("placement/it-0003/plan", {"workers": 2})
    (home / "r/manifests/it-0003/plan.json").unlink()
    with pytest.raises(Damaged, match=r"the journal has placement entries of 'it-0003', but no manifest"):
        collect(home)


def test_a_damaged_run_is_skipped_by_name_and_the_others_are_collected(home, capsys):
    make(home, "s", {"seed": 1})
    with open_run(str(home), "r").lock() as run:
        Chain(run).link("it-0001")
    (home / "r/manifests/it-0001/credit.json").unlink()
    before = files_of(home / "r")
    assert main(["gc", "--delete", "--store", str(home)]) == 1
    assert "run r: skipped: run 'r'" in capsys.readouterr().out
    assert files_of(home / "r") == before
    assert find_garbage(open_run(str(home), "s")) == {}


@pytest.mark.parametrize("key", ["shards/ab/0123.arrow", "report/steps/0000007.json", "policies/0123456789abcdef/a"])
def test_a_file_that_a_worker_writes_after_its_run_was_deleted_is_listed_and_not_deleted(home, capsys, key):
    """A bucket has no directories, so a worker can write to a run that a user has deleted meanwhile."""
    make(home, "s", {"seed": 1})
    open_store(f"{home}/registry/report").put("records/000001.json", b"{}")
    (home / "notes.txt").write_text("of the user")
    shutil.rmtree(home / "r")
    open_store(f"{home}/r").put(key, b"late")
    assert main(["gc", "--delete", "--store", str(home)]) == 0
    output = capsys.readouterr().out
    assert "run r: skipped: its run.json is missing, but 1 file (0.0 MB) of it" in output
    assert output.count("skipped") == 1 and (home / "r" / key).read_bytes() == b"late"


def test_a_shard_that_a_worker_writes_after_its_run_was_given_up_is_garbage(home):
    with open_run(str(home), "r").lock() as run:
        late = run.load("it-0001/credit").shards[0]
        content = run.store.read(late.key)
        delete_run(run, why="a test")
    open_store(f"{home}/r").put(late.key, content)
    run = open_run(str(home), "r")
    assert [entry.key for entry in find_garbage(run)["shards"]] == [late.key] and verify_store(run) == []
    assert [entry.key for entry in collect(home)["shards"]] == [late.key] and find_garbage(run) == {}


def test_a_shard_with_forgotten_prompts_that_a_worker_writes_again_is_reported_and_is_garbage(home):
    with open_run(str(home), "r").lock() as run:
        old = run.load("it-0001/credit").shards[0]
        content = run.store.read(old.key)
        collect_garbage(run)
        replacement = write_number_shard(run, 9)
        deleted = Deleted(why="rheostat forget", shard=old.key, rows=1)
        write_tombstone(run, tombstone_key(old.digest).rpartition("/")[2], deleted, replacement=(replacement,))
        run.store.delete(old.key)
    run = open_run(str(home), "r")
    assert find_garbage(run) == {} and verify_store(run) == []
    open_store(f"{home}/r").put(old.key, content)
    (problem,) = verify_store(run)
    assert old.key in problem and "run `rheostat forget` again" in problem
    assert [entry.key for entry in find_garbage(run)["shards"]] == [old.key]


def collect_and_die(home, deletion, what):
    deletions, delete = count(1), LocalStore.delete

    def dying(self, key):
        if next(deletions) == deletion:
            os.kill(os.getpid(), signal.SIGKILL)
        delete(self, key)

    LocalStore.delete = dying
    with open_run(str(home), "r").lock() as run:
        delete_run(run, why="a test") if what == "run" else collect_garbage(run)


@pytest.mark.parametrize(
    ("target", "deletion"), [*(("garbage", number) for number in range(1, 7)), ("run", 1), ("run", 4), ("run", 8)]
)
def test_a_collector_killed_while_deleting_damages_nothing_and_the_next_collector_finishes(home, target, deletion):
    with process(collect_and_die, home, deletion, target) as child:
        child.join()
    assert child.exitcode == -signal.SIGKILL
    run = open_run(str(home), "r")
    assert verify_store(run) == [] and find_garbage(run)
    collect(home)
    assert verify_store(run) == [] and find_garbage(run) == {}
    parts = [name for name in files_of(home / "r") if name.startswith(("shards/", "policies/"))]
    assert bool(parts) == (target == "garbage")


def test_a_commit_is_withdrawn_if_the_collector_deleted_its_shard(home, monkeypatch):
    """The worst moment: the commit has been checked but not written when the collector locks the run."""
    with open_run(str(home), "r").lock() as holder:
        epoch = holder.epoch
    stale = open_run(str(home), "r").join(epoch)
    manifest = Manifest(key="it-0003/credit", shards=(write_number_shard(stale, 3),))
    put = LocalStore.put

    def overtaken(self, key, data, *, durable=True):
        if key == "manifests/it-0003/credit.json":
            collect(home)
        return put(self, key, data, durable=durable)

    monkeypatch.setattr(LocalStore, "put", overtaken)
    with pytest.raises(Fenced, match=r"another process has deleted 'shards/.*'"):
        stale.commit(manifest)
    assert verify_store(open_run(str(home), "r")) == []


def test_the_collector_removes_a_manifest_committed_during_the_deletion_of_its_shard(home, monkeypatch):
    """Like the test before, except that the process that committed too late was killed."""
    left = create_run(str(home), "r", {})
    manifest = Manifest(key="it-0003/credit", run=left.record.fingerprint, shards=(write_number_shard(left, 3),))
    delete = LocalStore.delete

    def late(self, key):
        self.put("manifests/it-0003/credit.json", manifest.encode())
        delete(self, key)

    monkeypatch.setattr(LocalStore, "delete", late)
    collect(home)
    assert not (home / "r/manifests/it-0003").exists()
    assert verify_store(open_run(str(home), "r")) == []


def test_a_deleted_run_keeps_its_manifests_and_names_the_command_that_deleted_the_rest(home):
    with open_run(str(home), "r").lock() as run:
        made = run.require("it-0001/credit")
        delete_run(run, why="rheostat gc --keep 0")
    assert verify_store(open_run(str(home), "r")) == []
    left = {path.partition("/")[0] for path in files_of(home / "r")}
    assert left == {"run.json", "lease", "manifests", "report", "export", "expected"}
    again = open_run(str(home), "r")
    for read in (
        lambda: read_shard(again.store, made.shards[0]),
        lambda: fetch_bundle(again.store, made.bundles["weights"]),
    ):
        with pytest.raises(Damaged, match="files were deleted by retention"):
            read()
    with pytest.raises(RunChanged, match=r"were deleted by rheostat gc --keep 0 .* Another name"):
        check_not_deleted(again)


def age(home, name, days):
    """Make all files that a run has written this old by the store's clock."""
    for path in (home / name).rglob("*"):
        moment = path.stat().st_mtime - days * 86400
        os.utime(path, (moment, moment))


def names(home, **rules):
    return {*select_runs(str(home), ["r", "s", "t"], Rules(**rules))}


def test_rules_select_runs_to_delete_by_age_number_and_tag(home):
    for number, name in enumerate(("s", "t"), start=1):
        make(home, name)
        age(home, name, 20 * number)
    assert names(home) == set()
    assert names(home, older_than=timedelta(days=30)) == {"t"}
    assert names(home, older_than=timedelta(days=10)) == {"s", "t"}
    assert names(home, keep=1) == {"s", "t"}
    assert names(home, keep=2, older_than=timedelta(days=10)) == {"t"}
    with open_run(str(home), "t").lock() as run:
        tag_run(run, ["paper"])
    assert names(home, keep=1, tags=frozenset({"paper"})) == {"s"}
    with open_run(str(home), "s").lock() as run:
        delete_run(run, why="a test")
    assert names(home, keep=1) == {"t"}, "what is deleted does not count"


def test_a_run_is_kept_until_a_run_that_starts_from_its_policy_has_copied_the_policy(home):
    make(home, "s", {"policy": {"path": str(home / "r/policies/0123456789abcdef")}})
    make(home, "t")
    assert names(home, keep=0) == {"s", "t"}
    with open_run(str(home), "s").lock() as run:
        Chain(run).link("eval-0000")
    assert names(home, keep=0) == {"r", "s", "t"}


def test_folders_that_are_not_runs_are_never_changed(home):
    (home / "registry/policies/0123456789abcdef").mkdir(parents=True)
    (home / "registry/policies/0123456789abcdef/model.safetensors").write_bytes(b"promoted")
    before = files_of(home / "registry")
    names(home, keep=0)
    collect(home)
    assert files_of(home / "registry") == before
