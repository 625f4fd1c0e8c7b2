"""Addresses of other object stores, which fsspec reads: copies in the cache, and what is refused."""

from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFile

from rheostat.infra.errors import BadInput
from rheostat.infra.store.inputs import fetch_path, format_path, is_remote
from rheostat.models.config.data import FileData
from rheostat.models.data.files import file_problems
from tests.support.memory_bucket import Bucket, memory_bucket


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    monkeypatch.setenv("RHEOSTAT_CACHE", str(tmp_path / "cache"))
    with memory_bucket() as store:
        yield store


def test_a_file_at_an_address_is_copied_and_copied_again_after_it_changed(bucket):
    bucket.pipe_file("/data/rows.jsonl", b"first")
    path = Path("gs://data/rows.jsonl")
    assert is_remote(path) and format_path(path) == "gs://data/rows.jsonl"
    assert fetch_path(path).read_bytes() == b"first"
    bucket.pipe_file("/data/rows.jsonl", b"other")
    assert fetch_path(path).read_bytes() == b"other"


def test_a_directory_at_an_address_has_the_files_that_are_there_now(bucket):
    bucket.pipe({"/data/model/config.json": b"{}", "/data/model/sub/a.txt": b"a"})
    folder = fetch_path(Path("gs://data/model"))
    assert (folder / "config.json").read_bytes() == b"{}" and (folder / "sub" / "a.txt").read_bytes() == b"a"
    bucket.rm_file("/data/model/sub/a.txt")
    assert not (fetch_path(Path("gs://data/model")) / "sub" / "a.txt").exists()


def test_problems_are_read_from_an_address(bucket):
    bucket.pipe_file("/data/rows.jsonl", b'{"prompt": "one?", "answer": "1"}\n')
    data = FileData(path="gs://data/rows.jsonl", heldout_path="gs://data/rows.jsonl")
    [problem] = file_problems(data, "train", 0)
    assert problem.source == "gs://data/rows.jsonl:1"


def test_a_missing_address_is_refused(bucket):
    with pytest.raises(BadInput, match=r"gs://data/none does not exist"):
        fetch_path(Path("gs://data/none"))


@pytest.mark.parametrize("address", ["az://data/rows.jsonl"])
def test_an_address_whose_package_is_not_installed_names_the_package(address, monkeypatch, tmp_path):
    monkeypatch.setenv("RHEOSTAT_CACHE", str(tmp_path))
    with pytest.raises(BadInput, match=r"az://data/rows\.jsonl needs the package adlfs"):
        fetch_path(Path(address))


@pytest.mark.parametrize("name", ["/data/model/../../secret", "/data/model//etc/passwd"])
def test_an_object_whose_name_leads_out_of_the_folder_is_refused(bucket, tmp_path, name):
    Bucket.store[name] = MemoryFile(bucket, name, b"x")
    bucket.pipe_file("/data/model/config.json", b"{}")
    with pytest.raises(BadInput, match="name of this object"):
        fetch_path(Path("gs://data/model"))
    assert not [path for path in tmp_path.rglob("*") if path.name in ("secret", "passwd")]
