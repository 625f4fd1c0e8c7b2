"""A run in another store: the same objects, checked, whatever cut the copy short."""

import os
import signal
from itertools import count

import pyarrow as pa
import pytest

import infra.store.storage
from infra.errors import BadInput, Conflict, RunHeld
from infra.store.bundles import publish_bundle
from infra.store.copies import copy_run
from infra.store.disk import publish_file
from infra.store.manifests import Manifest
from infra.store.runs import create_run, list_runs, open_run
from infra.store.shards import write_shard
from infra.store.verify import verify_store
from tests.support.jobs import files_of, leftovers_of
from tests.support.processes import preload, process

preload(__name__)


@pytest.fixture
def source(tmp_path):
    commit(tmp_path / "source", 0)
    return tmp_path / "source"


def commit(store, number):
    """Have a run r with one more shard, bundle and entry of the journal."""
    directory = store.parent / f"policy-{number}"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(bytes([number]) * 1000)
    with create_run(str(store), "r", {}).hold() as run:
        bundle = publish_bundle(run.store, directory, prefix="policies")
        shard = write_shard(run.store, pa.table({"x": [number] * 100}), kind="test", metadata={})
        run.note(f"placement/{number}", {"seconds": 1.5})
        run.commit(Manifest(key=f"it-000{number}", shards=(shard,), bundles={"weights": bundle}))


def copy(source, target):
    return copy_run("r", str(source), str(target))


def test_a_copy_has_every_file_and_a_second_one_brings_over_what_is_new(source, tmp_path):
    open_run(str(source), "r").store.put("orders/000001/some-controller/000000.json", b"{}")
    made = copy(source, tmp_path / "target")
    open_run(str(source), "r").store.delete("orders/000001/some-controller/000000.json")
    assert files_of(tmp_path / "target/r") == files_of(source / "r"), (
        "what a driver that died had ordered is not the run's"
    )
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

    infra.store.storage.publish_file = publish
    copy(source, target)


@pytest.mark.parametrize("write", range(1, 8))
def test_a_copy_that_is_killed_is_no_run_and_the_next_one_goes_on(source, tmp_path, write):
    target = tmp_path / "target"
    with process(copy_and_die, source, target, write) as child:
        child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert list_runs(str(target)) == []
    made = copy(source, target)
    assert made.objects == 7 and made.found <= write - 1
    assert files_of(target / "r") == files_of(source / "r")
    assert leftovers_of(target) == []


def test_where_another_run_has_the_name_nothing_is_written(source, tmp_path):
    create_run(str(tmp_path / "target"), "r", {"seed": 1})
    before = files_of(tmp_path / "target/r")
    with pytest.raises(BadInput, match="has another run of that name"):
        copy(source, tmp_path / "target")
    assert files_of(tmp_path / "target/r") == before


def test_what_went_another_way_is_not_overwritten(source, tmp_path):
    copy(source, tmp_path / "target")
    commit(tmp_path / "target", 2)
    commit(source, 1)
    before = files_of(tmp_path / "target/r")
    with pytest.raises(Conflict, match=r"'lease/000002.json' .* nothing was overwritten"):
        copy(source, tmp_path / "target")
    assert files_of(tmp_path / "target/r") == before


def test_a_run_that_is_held_is_not_copied_and_none_is_copied_onto_one(source, tmp_path):
    with open_run(str(source), "r").hold(), pytest.raises(RunHeld, match="is held by process"):
        copy(source, tmp_path / "target")
    copy(source, tmp_path / "target")
    with open_run(str(tmp_path / "target"), "r").hold(), pytest.raises(BadInput, match="is held by another process"):
        copy(source, tmp_path / "target")


def test_a_run_is_not_copied_onto_itself(source):
    with pytest.raises(BadInput, match="expected another store"):
        copy(source, f"file://{source}")
