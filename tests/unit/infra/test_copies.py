"""Copies of runs to another store: the same objects, verified, also if an earlier copy was interrupted."""

import os
import signal
from itertools import count

import pytest

import rheostat.infra.store.local
from rheostat.infra.errors import BadInput, Conflict, Damaged, RunLocked
from rheostat.infra.store.copies import copy_run
from rheostat.infra.store.disk import publish_file
from rheostat.infra.store.local import LocalStore
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import create_run, list_runs, open_run
from rheostat.infra.store.verify import verify_store
from tests.support.jobs import files_of, leftovers_of
from tests.support.processes import preload, process
from tests.support.stores import publish_number_policy, write_number_shard

preload(__name__)


@pytest.fixture
def source(tmp_path):
    commit(tmp_path / "source", 0)
    return tmp_path / "source"


def commit(store, number):
    """Commit one more shard, bundle and entry of the journal to the run `r`."""
    with create_run(str(store), "r", {}).lock() as run:
        bundle = publish_number_policy(run, store.parent / f"policy-{number}", number)
        run.write_entry(f"placement/{number}", {"seconds": 1.5})
        shard = write_number_shard(run, number)
        run.commit(Manifest(key=f"it-000{number}", shards=(shard,), bundles={"weights": bundle}))


def copy(source, target):
    return copy_run("r", str(source), str(target))


def test_a_copy_has_every_file_and_a_second_copy_adds_only_new_files(source, tmp_path):
    open_run(str(source), "r").store.put("orders/000001/some-controller/000000.json", b"{}")
    made = copy(source, tmp_path / "target")
    open_run(str(source), "r").store.delete("orders/000001/some-controller/000000.json")
    assert files_of(tmp_path / "target/r") == files_of(source / "r"), "orders of a dead driver are not copied"
    assert (made.found, verify_store(made.run)) == (0, [])
    commit(source, 1)
    again = copy(source, tmp_path / "target")
    assert files_of(tmp_path / "target/r") == files_of(source / "r")
    assert (again.found, verify_store(again.run)) == (made.objects, [])


def copy_and_die(source, target, write):
    writes = count(1)

    def publish(*arguments, **named):
        if next(writes) == write:
            os.kill(os.getpid(), signal.SIGKILL)
        return publish_file(*arguments, **named)

    rheostat.infra.store.local.publish_file = publish
    copy(source, target)


@pytest.mark.parametrize("write", range(1, 9))
def test_a_killed_copy_is_not_a_run_and_the_next_copy_continues(source, tmp_path, write):
    target = tmp_path / "target"
    with process(copy_and_die, source, target, write) as child:
        child.join()
    assert child.exitcode == -signal.SIGKILL
    assert list_runs(str(target)) == []
    made = copy(source, target)
    assert made.objects == 8 and made.found <= write - 1
    assert files_of(target / "r") == files_of(source / "r")
    assert leftovers_of(target) == []


@pytest.mark.parametrize(
    ("has_diverged", "error", "message"),
    [(False, BadInput, "a different run with this name"), (True, Conflict, r"'lease/000002.json'")],
)
def test_another_run_or_a_copy_that_has_diverged_is_not_overwritten(source, tmp_path, has_diverged, error, message):
    if has_diverged:
        copy(source, tmp_path / "target")
        commit(tmp_path / "target", 2)
        commit(source, 1)
    else:
        create_run(str(tmp_path / "target"), "r", {"seed": 1})
    before = files_of(tmp_path / "target/r")
    with pytest.raises(error, match=message):
        copy(source, tmp_path / "target")
    assert files_of(tmp_path / "target/r") == before


def test_a_listing_that_lacks_a_named_object_copies_nothing(source, tmp_path, monkeypatch):
    entries = LocalStore.entries
    short = lambda store, prefix: [each for each in entries(store, prefix) if "shards/" not in each.key]  # noqa: E731
    monkeypatch.setattr(LocalStore, "entries", short)
    with pytest.raises(Damaged, match=r"'shards/.*not in the listing of the store\. Nothing was copied"):
        copy(source, tmp_path / "target")
    assert not (tmp_path / "target/r/run.json").exists()


def test_a_locked_run_is_neither_copied_nor_overwritten_by_a_copy(source, tmp_path):
    with open_run(str(source), "r").lock(), pytest.raises(RunLocked, match="is locked by process"):
        copy(source, tmp_path / "target")
    copy(source, tmp_path / "target")
    with open_run(str(tmp_path / "target"), "r").lock(), pytest.raises(BadInput, match="is locked by another process"):
        copy(source, tmp_path / "target")


def test_a_run_is_not_copied_onto_itself(source):
    with pytest.raises(BadInput, match="Choose another store"):
        copy(source, f"file://{source}")
