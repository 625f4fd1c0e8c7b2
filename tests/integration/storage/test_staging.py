"""Bundles that are read on this machine before they are uploaded to a bucket."""

from dataclasses import replace

import pytest

import rheostat.infra.store.bundles
from rheostat.infra.errors import Damaged
from rheostat.infra.store.bundles import (
    complete_put_bundle,
    fetch_bundle,
    has_bundle,
    publish_bundle,
    verify_while_reading,
)
from rheostat.infra.store.staging import find_readable_store, upload_staged_bundle, upload_staged_files
from rheostat.infra.store.storage import open_store
from tests.support.stores import write_files

pytestmark = pytest.mark.s3

FILES = {"config.json": b"{}", "model-1.safetensors": b"1" * 100, "model-2.safetensors": b"2" * 100}


@pytest.fixture
def place(s3_servers):
    return s3_servers.start("moto").place()


@pytest.fixture
def store(place, tmp_path):
    return replace(place, environment={**place.environment, "RHEOSTAT_CACHE": str(tmp_path / "cache")}).open()


@pytest.fixture
def staged(store, monkeypatch):
    """Bundle that is only on this machine, as another process sees it."""
    with store.staging().scratch() as scratch:
        write_files(scratch, FILES)
        bundle = publish_bundle(store.staging(), scratch, prefix="policies", durable=False)
    monkeypatch.setattr(rheostat.infra.store.bundles, "_known", {})
    return bundle


def test_a_staged_bundle_is_read_before_and_during_its_upload(store, staged, place, tmp_path):
    assert not has_bundle(store, staged) and store.entries("policies/") == []
    with verify_while_reading(find_readable_store(store, staged), staged, large_suffix=".safetensors") as directory:
        uploaded = [upload_staged_files(store, staged, share=share, shares=2) for share in (0, 1)]
        assert {name: (directory / name).read_bytes() for name in FILES} == FILES
        assert find_readable_store(store, staged) == store.staging(), "without bundle.json there is no bundle"
    complete_put_bundle(store, staged, uploaded[0])
    assert uploaded[0] == uploaded[1] and find_readable_store(store, staged) == store
    assert fetch_bundle(store, staged) == directory, "the uploaded files are those of the cache"
    other = replace(place, environment={**place.environment, "RHEOSTAT_CACHE": str(tmp_path / "other")}).open()
    assert {name: (fetch_bundle(other, staged) / name).read_bytes() for name in FILES} == FILES


def test_an_upload_that_was_interrupted_is_completed(store, staged):
    upload_staged_files(store, staged, share=1, shares=3)
    upload_staged_bundle(store, staged)
    assert has_bundle(store, staged)
    requests = dict(store.requests())
    upload_staged_bundle(store, staged)
    assert store.requests()["PUT"] == requests["PUT"]


def test_a_damaged_staged_file_is_not_uploaded(store, staged):
    path = store.staging().local_path(f"{staged.key}/model-1.safetensors")
    path.write_bytes(b"3" * 100)
    with pytest.raises(Damaged, match=r"model-1\.safetensors"):
        upload_staged_bundle(store, staged)
    assert store.entries("policies/") == []


def test_a_bundle_that_is_on_no_disk_of_this_machine_is_not_found(store, staged, tmp_path, place):
    other = replace(place, environment={**place.environment, "RHEOSTAT_CACHE": str(tmp_path / "other")}).open()
    assert find_readable_store(other, staged) is other
    upload_staged_bundle(other, staged)
    with pytest.raises(Damaged, match="was never completely published"):
        fetch_bundle(other, staged)


def test_a_local_store_stages_in_itself(tmp_path):
    store = open_store(str(tmp_path / "store"))
    assert store.staging() is store
