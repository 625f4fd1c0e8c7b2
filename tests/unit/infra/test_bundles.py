"""Bundles: directories that are published completely and fetched exactly as they were."""

import os
import shutil
import subprocess
import sys
import time

import pytest
from blake3 import blake3

from rheostat.infra.errors import BadInput, Damaged
from rheostat.infra.store import bundles
from rheostat.infra.store.bundles import (
    BundledFile,
    BundleRef,
    delete_bundle,
    fetch_bundle,
    fetch_bundle_file,
    publish_bundle,
    sync_bundle,
    verify_while_reading,
)
from rheostat.infra.store.checksums import digest_file
from rheostat.infra.store.file_writer import write_hashed
from rheostat.infra.store.storage import open_store
from tests.support.processes import CONTEXT, preload, process
from tests.support.stores import RacedStore, flip_bit, read_files, write_files

preload(__name__)

FILES = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 1000, "zero/rank_0.pt": b"state", "empty": b""}


@pytest.fixture
def policy(tmp_path):
    return write_files(tmp_path / "policy", FILES)


def publish(store, directory, **options):
    return publish_bundle(store, directory, prefix="policies", **options)


@pytest.fixture
def ref(store, policy):
    """Reference of the published policy."""
    return publish(store, policy)


def in_a_fresh_process(store, ref):
    """Fetch in a process that has verified nothing yet. Return the problem, or nothing."""
    results = CONTEXT.Queue()
    with process(_fetch, store.uri, ref, results):
        return results.get()


def _fetch(uri, ref, results):
    try:
        fetch_bundle(open_store(uri), ref)
        results.put("")
    except Damaged as error:
        results.put(str(error))


def test_a_directory_is_fetched_as_it_was_published(store, ref):
    fetched = read_files(fetch_bundle(store, ref))
    contents = fetched.pop("bundle.json")
    assert fetched == FILES
    assert ref.digest == blake3(contents).hexdigest() and ref.key == f"policies/{ref.digest[:16]}"
    assert ref.bytes == sum(map(len, FILES.values()))


def test_the_reference_depends_on_the_names_and_bytes_of_the_files_alone(store, ref, tmp_path):
    entries = [entry.key for entry in store.entries("")]
    again = write_files(tmp_path / "again", dict(reversed(FILES.items())))
    assert publish(store, again) == ref
    assert [entry.key for entry in store.entries("")] == entries
    other_byte = write_files(tmp_path / "byte", FILES | {"config.json": b"{ "})
    other_name = write_files(tmp_path / "name", FILES | {"config2.json": b"{}"})
    (other_name / "config.json").unlink()
    assert len({ref.digest, publish(store, other_byte).digest, publish(store, other_name).digest}) == 3


def test_files_from_the_scratch_directory_of_the_store_are_linked_and_other_files_are_copied(store, policy):
    with store.scratch() as scratch:
        made = write_files(scratch / "policy", FILES)
        inodes = {name: (made / name).stat().st_ino for name in FILES}
        ref = publish(store, made)
    assert {name: store.local_path(f"{ref.key}/{name}").stat().st_ino for name in FILES} == inodes
    assert read_files(policy) == FILES and in_a_fresh_process(store, ref) == ""
    copied = publish(store, write_files(policy, {"more": b"1"}))
    assert store.local_path(f"{copied.key}/more").stat().st_ino != (policy / "more").stat().st_ino


def test_a_file_that_was_hashed_while_it_was_written_is_not_read_again(store, policy):
    written = {"model.safetensors": write_hashed(policy / "model.safetensors", [b"ab", memoryview(b""), b"c"])}
    assert written["model.safetensors"] == BundledFile(digest=blake3(b"abc").hexdigest(), bytes=3)
    (policy / "model.safetensors").write_bytes(b"abd")  # whoever read it again would say so
    ref = publish(store, policy, written_files=written)
    assert fetch_bundle(store, ref).is_dir()
    assert "expected digest" in in_a_fresh_process(store, ref)


@pytest.fixture
def synced(monkeypatch):
    """Inodes that this process has synced, in order."""
    inodes, fsync = [], os.fsync

    def noted(descriptor):
        inodes.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    return inodes


def inodes_of(store, ref):
    return {path.stat().st_ino for path in store.local_path(f"{ref.key}/bundle.json").parent.rglob("*")}


@pytest.mark.parametrize("is_published_again", [False, True])
def test_a_bundle_published_early_becomes_durable_when_synced_or_published_durably(
    store, policy, synced, is_published_again
):
    early = publish(store, policy, durable=False)
    assert in_a_fresh_process(store, early) == "" and not inodes_of(store, early) & set(synced)
    if is_published_again:
        assert publish(store, policy) == early
    else:
        sync_bundle(store, early)
    assert inodes_of(store, early) <= set(synced)


def test_a_process_that_did_not_publish_a_bundle_verifies_it_before_it_syncs_it(store, policy, synced, monkeypatch):
    early = publish(store, policy, durable=False)
    monkeypatch.setattr(bundles, "_known", {})
    store.local_path(f"{early.key}/model.safetensors").write_bytes(b"torn")
    with pytest.raises(Damaged, match=r"model\.safetensors"):
        sync_bundle(store, early)
    assert not inodes_of(store, early) & set(synced)


def test_large_files_are_verified_while_they_are_used_and_small_ones_before(store, ref, monkeypatch):
    monkeypatch.setattr(bundles, "_known", {})
    with verify_while_reading(store, ref, large_suffix=".safetensors") as directory:
        assert read_files(directory).keys() == {*FILES, "bundle.json"}
    monkeypatch.setattr(bundles, "digest_file", lambda path: pytest.fail(f"{path} is known, and read again"))
    with verify_while_reading(store, ref, large_suffix=".safetensors"):
        pass


def test_damage_replaces_the_error_of_the_code_that_uses_the_bundle(store, ref, monkeypatch):
    monkeypatch.setattr(bundles, "_known", {})
    store.local_path(f"{ref.key}/model.safetensors").write_bytes(bytes(len(FILES["model.safetensors"])))
    with (
        pytest.raises(Damaged, match=r"model\.safetensors"),
        verify_while_reading(store, ref, large_suffix=".safetensors"),
    ):
        raise ValueError("no safetensors")
    with (
        pytest.raises(Damaged, match=r"model\.safetensors"),
        verify_while_reading(store, ref, large_suffix=".safetensors"),
    ):
        pass
    (store.local_path(f"{ref.key}/config.json")).write_bytes(b"[]")
    with pytest.raises(Damaged, match="config"), verify_while_reading(store, ref, large_suffix=".safetensors"):
        pytest.fail("its configuration was to be proved first")


@pytest.mark.parametrize("name", ["model.safetensors", "zero/rank_0.pt", "bundle.json"])
def test_a_flipped_bit_in_any_file_is_damage_that_names_it(store, ref, name):
    path = store.local_path(f"{ref.key}/{name}")
    flip_bit(path, 1)
    with pytest.raises(Damaged, match=r"(expected|must have) digest") as caught:
        fetch_bundle(store, ref)
    assert name == "bundle.json" or name in str(caught.value)


@pytest.mark.parametrize("moment", ["bundle.json", "", "config.json", "model.safetensors"])
def test_a_bundle_that_is_deleted_while_it_is_fetched_is_damage(store, ref, moment, monkeypatch):
    def delete(key):
        if key == f"{ref.key}/{moment}":
            shutil.rmtree(store.root / ref.key, ignore_errors=True)

    monkeypatch.setattr(bundles, "_known", {})
    with pytest.raises(Damaged, match=f"{ref.key}.*(is missing|found no)"):
        fetch_bundle(RacedStore(store.root, act=delete), ref)


def test_a_cut_missing_or_additional_file_is_damage_that_names_it(store, ref):
    directory = fetch_bundle(store, ref)
    (directory / "pytorch_model.bin").write_bytes(b"a pickle in disguise")
    assert "'pytorch_model.bin': expected no file, found 20 bytes" in in_a_fresh_process(store, ref)
    (directory / "pytorch_model.bin").unlink()
    assert in_a_fresh_process(store, ref) == ""
    (directory / "config.json").write_bytes(b"{")
    assert "'config.json': expected 2 bytes, found 1 bytes" in in_a_fresh_process(store, ref)
    (directory / "config.json").unlink()
    assert "'config.json': expected 2 bytes, found no file" in in_a_fresh_process(store, ref)


@pytest.mark.parametrize("name", ["config.json", "zero/rank_0.pt", "zero", "bundle.json"])
def test_a_link_in_place_of_a_file_is_damage_even_if_it_points_to_the_same_bytes(store, ref, tmp_path, name):
    path = tmp_path / "run" / ref.key / name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert name in in_a_fresh_process(store, ref)
    with pytest.raises(Damaged, match=r"symbolic link|missing|found no file"):
        fetch_bundle(store, ref)
    with pytest.raises(Damaged, match="symbolic link"):
        fetch_bundle_file(store, ref, {"zero": "zero/rank_0.pt", "bundle.json": "config.json"}.get(name, name))


def test_publishing_a_damaged_bundle_again_repairs_it(store, policy, ref):
    for name in ("model.safetensors", "bundle.json"):
        store.local_path(f"{ref.key}/{name}").write_bytes(b"torn")
    assert publish(store, policy) == ref
    assert in_a_fresh_process(store, ref) == ""


def test_a_bundle_without_its_table_of_contents_does_not_exist(store, ref):
    fetch_bundle(store, ref)
    store.delete(f"{ref.key}/bundle.json")
    with pytest.raises(Damaged, match=f"{ref.key}.*never completely published"):
        fetch_bundle(store, ref)


def test_a_deleted_bundle_leaves_no_file_and_can_be_published_again(store, policy, ref):
    fetch_bundle(store, ref)
    delete_bundle(store, ref)
    delete_bundle(store, ref)
    assert store.entries("") == []
    with pytest.raises(Damaged):
        fetch_bundle(store, ref)
    assert publish(store, policy) == ref
    assert read_files(fetch_bundle(store, ref)).keys() == FILES.keys() | {"bundle.json"}


@pytest.mark.parametrize("name", [".hidden", "a b", "x..y", "bundle.json", "-rf"])
def test_a_file_name_that_is_not_safe_is_refused_before_anything_is_written(store, tmp_path, name):
    with pytest.raises(BadInput):
        publish(store, write_files(tmp_path / "policy", {"ok": b"", name: b""}))
    assert store.entries("") == []


def test_links_special_files_and_empty_directories_are_refused(store, tmp_path):
    outside = write_files(tmp_path / "outside", {"secret": b"key"})
    linked = write_files(tmp_path / "linked", {"ok": b""})
    (linked / "link").symlink_to(outside / "secret")
    folder = write_files(tmp_path / "folder", {"ok": b""})
    (folder / "link").symlink_to(outside)
    pipe = write_files(tmp_path / "pipe", {"ok": b""})
    os.mkfifo(pipe / "fifo")
    (tmp_path / "empty").mkdir()
    for directory in (linked, folder, pipe, tmp_path / "empty", tmp_path / "absent"):
        with pytest.raises(BadInput, match="stored as a bundle"):
            publish(store, directory)


def _publish_for_ever(uri, root, ready):
    store = open_store(uri)
    for number in range(1_000_000):
        files = {"a": os.urandom(200_000), "b": os.urandom(200_000)}
        publish(store, write_files(root / str(number), files))
        ready.set()


def test_every_existing_bundle_is_complete_after_its_publisher_is_killed(store, tmp_path):
    for attempt in range(4):
        ready = CONTEXT.Event()
        with process(_publish_for_ever, store.uri, tmp_path / f"source-{attempt}", ready):
            assert ready.wait()
            time.sleep(0.01 + 0.02 * attempt)
    published = [entry.key for entry in store.entries("policies/") if entry.key.endswith("bundle.json")]
    for key in published:
        digest = blake3(store.read(key)).hexdigest()
        assert fetch_bundle(store, BundleRef(key=f"policies/{digest[:16]}", digest=digest, bytes=400_000)).is_dir()
    assert len(published) >= 4


FORKED = """
import os, signal, sys
from pathlib import Path
from rheostat.infra.store import checksums
checksums.MIN_THREADED_BYTES = 1
path = Path(sys.argv[1])
before = checksums.digest_file(path)
child = os.fork()
signal.alarm(60)
if child == 0:
    os._exit(checksums.digest_file(path) != before)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""
"""Program that computes the digest of a file with several threads, and again in a forked process."""


def test_a_process_forked_after_a_digest_with_several_threads_computes_digests(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(2**21))
    subprocess.run([sys.executable, "-c", FORKED, str(path)], check=True)
    assert digest_file(path) == blake3(path.read_bytes()).hexdigest()
