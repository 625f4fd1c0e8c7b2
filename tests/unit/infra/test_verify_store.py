"""Verification finds all damage of a store. Exports are copies."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rheostat.infra.errors import BadInput
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import create_run
from rheostat.infra.store.shards import read_shard
from rheostat.infra.store.verify import verify_store
from rheostat.tasks.views.export import export_parquet
from tests.support.stores import flip_bit, publish_number_policy, write_number_shard


@pytest.fixture
def run(tmp_path):
    """Locked run with two committed shards and two committed policies."""
    with create_run(str(tmp_path / "runs"), "r", {}).lock() as run:
        for number in range(2):
            bundle = publish_number_policy(run, tmp_path / f"policy-{number}", number)
            shard = write_number_shard(run, number)
            run.commit(Manifest(key=f"it-000{number}", shards=(shard,), bundles={"weights": bundle}))
        yield run


def test_a_flipped_bit_in_any_committed_object_is_one_problem_that_names_it(run):
    for manifest in run.manifests():
        read_shard(run.store, manifest.shards[0])
    for entry in run.store.entries(""):
        if entry.key == "lock":
            continue
        path = run.store.local_path(entry.key)
        data = path.read_bytes()
        flip_bit(path, max(-9, -len(data)))
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


def test_a_damaged_shard_that_no_manifest_names_is_no_problem(run):
    assert verify_store(run) == []
    flip_bit(run.store.local_path(write_number_shard(run, 7).key))
    assert verify_store(run) == []


def test_an_export_is_one_parquet_copy_that_is_written_once(run):
    tables = [read_shard(run.store, manifest.shards[0]) for manifest in run.manifests()]
    path = Path(export_parquet(run, (table for table in tables), "it-0001"))
    assert path == run.store.local_path("export/it-0001.parquet")
    assert pq.read_table(path)["x"].to_pylist() == [0] * 100 + [1] * 100
    assert pq.ParquetFile(path).metadata.row_group(0).column(0).compression == "ZSTD"
    data = path.read_bytes()
    assert export_parquet(run, iter([]), "it-0001") == str(path) and path.read_bytes() == data


def test_an_export_of_nothing_or_of_mixed_columns_is_refused_and_leaves_nothing(run):
    for tables in ([], [pa.table({"x": [1]}), pa.table({"y": [1]})]):
        with pytest.raises(BadInput, match="'bad'"):
            export_parquet(run, tables, "bad")
    assert run.store.entries("export/") == []
