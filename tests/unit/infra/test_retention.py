"""Verification finds every damage; retention and garbage collection delete only what nobody needs."""

import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra.errors import BadInput, Damaged
from infra.store.bundles import fetch_bundle, publish_bundle
from infra.store.manifests import Manifest
from infra.store.retention import collect_garbage, retire_bundle
from infra.store.runs import create_run, open_run
from infra.store.shards import read_shard, write_shard
from infra.store.verify import verify_store
from tasks.views.export import export_parquet


@pytest.fixture
def run(tmp_path):
    """A held run with two committed shards and two committed policies."""
    with create_run(str(tmp_path / "runs"), "r", {}).hold() as run:
        for number in range(2):
            bundle = publish_bundle(run.store, policy(tmp_path, number), prefix="policies")
            shard = shard_of(run, number)
            run.commit(Manifest(key=f"it-000{number}", shards=(shard,), bundles={"weights": bundle}))
        yield run


def policy(tmp_path, number):
    directory = tmp_path / f"policy-{number}"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(bytes([number]) * 1000)
    (directory / "config.json").write_bytes(b"{}")
    return directory


def shard_of(run, number):
    return write_shard(run.store, pa.table({"x": [number] * 100}), kind="test", metadata={})


def age(run, prefix="", seconds=2 * 86400):
    """Make objects look old by the store's own clock."""
    for entry in run.store.entries(prefix):
        then = run.store.clock() - seconds
        os.utime(run.store.local(entry.key), (then, then))


def keys(entries):
    return [entry.key for entry in entries]


def test_a_whole_run_has_no_problems(run):
    assert verify_store(run) == []


def test_a_flipped_bit_in_any_committed_object_is_one_problem_that_names_it(run):
    for manifest in run.manifests():
        read_shard(run.store, manifest.shards[0])
    for entry in run.store.entries(""):
        if entry.key == "lock":
            continue
        path = run.store.local(entry.key)
        data = path.read_bytes()
        path.write_bytes(data[:-9] + bytes([data[-9] ^ 2]) + data[-8:] if len(data) > 9 else b"[]")
        problems = verify_store(run)
        name = entry.key.removeprefix("manifests/").removesuffix(".json")
        owner = entry.key.rpartition("/")[0] if entry.key.startswith("policies/") else name
        assert len(problems) == 1 and (owner in problems[0] or "run.json" in problems[0])
        path.write_bytes(data)
    assert verify_store(run) == []


def test_a_missing_shard_or_bundle_is_a_problem_that_names_it(run):
    first, second = run.manifests()
    run.store.delete(first.shards[0].key)
    run.store.delete(f"{second.bundles['weights'].key}/bundle.json")
    missing_shard, missing_bundle = verify_store(run)
    assert first.shards[0].key in missing_shard and second.bundles["weights"].key in missing_bundle


def test_what_no_manifest_names_is_no_problem(run):
    run.store.local(shard_of(run, 7).key).write_bytes(b"torn")
    assert verify_store(run) == []


def test_a_retired_bundle_is_gone_for_good_and_says_so(run):
    bundle = run.manifests("it-0000")[0].bundles["weights"]
    fetch_bundle(run.store, bundle)
    retire_bundle(run, bundle)
    retire_bundle(run, bundle)
    assert run.store.entries(f"{bundle.key}/") == [] and verify_store(run) == []
    with pytest.raises(Damaged, match=f"{bundle.key}.*retired: retention deleted its files"):
        fetch_bundle(run.store, bundle)
    assert fetch_bundle(run.store, run.manifests("it-0001")[0].bundles["weights"]).is_dir()


def test_a_retirement_cut_short_is_no_problem_and_is_finished_by_the_garbage_collection(run):
    bundle = run.manifests("it-0000")[0].bundles["weights"]
    contents = run.store.read(f"{bundle.key}/config.json")
    retire_bundle(run, bundle)
    run.store.put(f"{bundle.key}/config.json", contents)
    age(run)
    assert verify_store(run) == []
    assert keys(collect_garbage(run, dry_run=False)) == [f"{bundle.key}/config.json"]


def test_garbage_is_only_what_no_manifest_names_and_is_old(run, tmp_path):
    orphan, bundle = shard_of(run, 7), publish_bundle(run.store, policy(tmp_path, 7), prefix="policies")
    age(run)
    young = shard_of(run, 8)
    expected = sorted([orphan.key, *keys(run.store.entries(f"{bundle.key}/"))])
    before = keys(run.store.entries(""))
    assert keys(collect_garbage(run)) == expected and keys(run.store.entries("")) == before
    assert keys(collect_garbage(run, dry_run=False)) == expected
    assert keys(run.store.entries("")) == [key for key in before if key not in expected]
    assert run.store.exists(young.key) and verify_store(run) == [] and collect_garbage(run) == []


def test_an_old_orphan_that_a_writer_makes_again_is_young_and_stays(run):
    orphan = shard_of(run, 7)
    age(run)
    assert shard_of(run, 7) == orphan
    assert collect_garbage(run, dry_run=False) == []
    run.commit(Manifest(key="late", shards=(orphan,)))
    assert verify_store(run) == []


def test_clocks_of_the_machine_do_not_make_a_young_object_old(run):
    shard_of(run, 7)
    age(run, seconds=-3600)
    assert collect_garbage(run, dry_run=False) == []


def test_garbage_is_not_deleted_from_a_run_that_is_open_for_reading(run, tmp_path):
    reader = open_run(str(tmp_path / "runs"), "r")
    assert collect_garbage(reader) == []
    with pytest.raises(BadInput, match="open for reading"):
        collect_garbage(reader, dry_run=False)


def test_an_export_is_one_parquet_copy_that_is_written_once(run):
    tables = [read_shard(run.store, manifest.shards[0]) for manifest in run.manifests()]
    path = export_parquet(run, (table for table in tables), "it-0001")
    assert path == run.store.local("export/it-0001.parquet")
    assert pq.read_table(path)["x"].to_pylist() == [0] * 100 + [1] * 100
    assert pq.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD"
    data = path.read_bytes()
    assert export_parquet(run, iter([]), "it-0001") == path and path.read_bytes() == data


def test_an_export_of_nothing_or_of_mixed_columns_is_refused_and_leaves_nothing(run):
    for tables in ([], [pa.table({"x": [1]}), pa.table({"y": [1]})]):
        with pytest.raises(BadInput, match="export 'bad'"):
            export_parquet(run, tables, "bad")
    assert run.store.entries("export/") == []
