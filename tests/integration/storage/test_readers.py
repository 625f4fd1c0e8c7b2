"""Other tools that read exports in a bucket: DuckDB, Polars and `datasets`, as in docs/s3.md."""

import json

import datasets
import duckdb
import polars as pl
import pytest
import s3fs

from rheostat.flows.cli.app import main
from tests.support.past_runs import NAME, past_versions, unpack_run
from tests.support.s3_servers import ACCESS_KEY, SECRET_KEY

pytestmark = [pytest.mark.s3, pytest.mark.timeout(600)]


@pytest.fixture
def exported(s3_servers, capsys, tmp_path, monkeypatch):
    """Finished run, exported in a bucket, and the sum of the rewards of its completions."""
    disk = str(unpack_run(past_versions()[-1], tmp_path))
    place = s3_servers.start("moto").place()
    for name, value in place.environment.items():
        monkeypatch.setenv(name, value)
    place.open()
    assert main(["copy", NAME, disk, place.uri]) == 0
    assert main(["export", NAME, "--store", place.uri]) == 0
    capsys.readouterr()
    sql = "select count(*) as rows, sum(reward) as reward from rollouts"
    assert main(["query", sql, NAME, "--store", disk, "--json"]) == 0
    (expected,) = json.loads(capsys.readouterr().out)
    assert expected["rows"] > 0
    yield place.environment["AWS_ENDPOINT_URL"], f"{place.uri}/{NAME}/export/*.parquet", expected
    s3fs.S3FileSystem.clear_instance_cache()


def test_duckdb_reads_exports_through_s3fs(exported):
    endpoint, address, expected = exported
    database = duckdb.connect()
    database.register_filesystem(s3fs.S3FileSystem(endpoint_url=endpoint, key=ACCESS_KEY, secret=SECRET_KEY))
    found = database.sql(f"select count(*), sum(reward) from read_parquet('{address}')").fetchall()
    assert found == [(expected["rows"], pytest.approx(expected["reward"]))]


def test_polars_scans_exports(exported):
    endpoint, address, expected = exported
    keys = {"aws_endpoint_url": endpoint, "aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY}
    options = {**keys, "aws_region": "us-east-1", "aws_allow_http": "true"}
    table = pl.scan_parquet(address, storage_options=options).select(pl.len(), pl.sum("reward")).collect()
    assert table.row(0) == (expected["rows"], pytest.approx(expected["reward"]))


def test_datasets_loads_exports(exported, tmp_path):
    endpoint, address, expected = exported
    options = {"key": ACCESS_KEY, "secret": SECRET_KEY, "endpoint_url": endpoint}
    loaded = datasets.load_dataset(
        "parquet", data_files=address, split="train", storage_options=options, cache_dir=str(tmp_path)
    )
    assert (len(loaded), sum(loaded["reward"])) == (expected["rows"], pytest.approx(expected["reward"]))


def test_a_query_gives_the_same_answer_in_the_bucket_and_writes_nothing(exported, capsys):
    _, address, expected = exported
    store = address.partition(f"/{NAME}/")[0]
    sql = "select count(*) as rows, sum(reward) as reward from rollouts"
    assert main(["query", sql, "--store", store, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [expected]
