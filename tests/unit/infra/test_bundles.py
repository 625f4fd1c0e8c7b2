"""Bundles: directories that are published whole and fetched exactly as they were."""

import os
import random
import time

import pytest
from blake3 import blake3

from infra.errors import BadInput, Damaged
from infra.store import bundles
from infra.store.bundles import (
    BundledFile,
    BundleRef,
    delete_bundle,
    fetch_bundle,
    fetch_file,
    proved_beside,
    publish_bundle,
    sync_bundle,
    write_hashed,
)
from infra.store.storage import open_store
from tests.support.processes import CONTEXT, preload, process

preload(__name__)

FILES = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 1000, "zero/rank_0.pt": b"state", "empty": b""}


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path / "run"))


@pytest.fixture
def policy(tmp_path):
    return make(tmp_path / "policy", FILES)


def make(directory, files):
    for name, data in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return directory


def files_of(directory):
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def in_a_fresh_process(store, ref):
    """Fetch where nothing has been verified yet; return the problem or nothing."""
    results = CONTEXT.Queue()
    with process(_fetch, store.uri, ref, results):
        return results.get(timeout=30)


def _fetch(uri, ref, results):
    try:
        fetch_bundle(open_store(uri), ref)
        results.put("")
    except Damaged as error:
        results.put(str(error))


def test_a_directory_is_fetched_as_it_was_published(store, policy):
    ref = publish_bundle(store, policy, prefix="policies")
    fetched = files_of(fetch_bundle(store, ref))
    contents = fetched.pop("bundle.json")
    assert fetched == FILES
    assert ref.digest == blake3(contents).hexdigest() and ref.key == f"policies/{ref.digest[:16]}"
    assert ref.bytes == sum(map(len, FILES.values()))


def test_publishing_the_same_files_again_gives_the_same_reference(store, policy, tmp_path):
    ref = publish_bundle(store, policy, prefix="policies")
    entries = [entry.key for entry in store.entries("")]
    again = make(tmp_path / "again", dict(reversed(FILES.items())))
    assert publish_bundle(store, again, prefix="policies") == ref
    assert [entry.key for entry in store.entries("")] == entries


def test_files_of_the_stores_own_scratch_are_not_copied_and_others_are(store, policy):
    with store.scratch() as scratch:
        made = make(scratch / "policy", FILES)
        inodes = {name: (made / name).stat().st_ino for name in FILES}
        ref = publish_bundle(store, made, prefix="policies")
    assert {name: store.local(f"{ref.key}/{name}").stat().st_ino for name in FILES} == inodes
    assert files_of(policy) == FILES and in_a_fresh_process(store, ref) == ""
    copied = publish_bundle(store, make(policy, {"more": b"1"}), prefix="policies")
    assert store.local(f"{copied.key}/more").stat().st_ino != (policy / "more").stat().st_ino


def test_what_was_hashed_while_it_was_written_is_not_read_again(store, policy):
    written = {"model.safetensors": write_hashed(policy / "model.safetensors", [b"ab", memoryview(b""), b"c"])}
    assert written["model.safetensors"] == BundledFile(digest=blake3(b"abc").hexdigest(), bytes=3)
    (policy / "model.safetensors").write_bytes(b"abd")  # whoever read it again would say so
    ref = publish_bundle(store, policy, prefix="policies", written=written)
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
    return {path.stat().st_ino for path in store.local(f"{ref.key}/bundle.json").parent.rglob("*")}


def test_a_bundle_that_is_published_early_is_whole_for_all_and_durable_once_it_is_synced(store, policy, synced):
    early = publish_bundle(store, policy, prefix="policies", durable=False)
    assert in_a_fresh_process(store, early) == "" and not inodes_of(store, early) & set(synced)
    sync_bundle(store, early)
    assert inodes_of(store, early) <= set(synced)


def test_publishing_a_bundle_durably_syncs_what_another_published_early(store, policy, synced):
    early = publish_bundle(store, policy, prefix="policies", durable=False)
    assert publish_bundle(store, policy, prefix="policies") == early
    assert inodes_of(store, early) <= set(synced)


def test_a_process_that_did_not_publish_a_bundle_proves_it_before_it_syncs(store, policy, synced, monkeypatch):
    early = publish_bundle(store, policy, prefix="policies", durable=False)
    monkeypatch.setattr(bundles, "_known", {})
    store.local(f"{early.key}/model.safetensors").write_bytes(b"torn")
    with pytest.raises(Damaged, match=r"model\.safetensors"):
        sync_bundle(store, early)
    assert not inodes_of(store, early) & set(synced)


def test_large_files_are_proved_beside_what_is_done_with_them_and_small_ones_before(store, policy, monkeypatch):
    ref = publish_bundle(store, policy, prefix="policies")
    monkeypatch.setattr(bundles, "_known", {})
    with proved_beside(store, ref, large=".safetensors") as directory:
        assert files_of(directory).keys() == {*FILES, "bundle.json"}
    monkeypatch.setattr(bundles, "_digest", lambda path: pytest.fail(f"{path} is known, and read again"))
    with proved_beside(store, ref, large=".safetensors"):
        pass


def test_damage_ends_what_is_done_with_a_bundle_and_explains_what_it_raised(store, policy, monkeypatch):
    ref = publish_bundle(store, policy, prefix="policies")
    monkeypatch.setattr(bundles, "_known", {})
    store.local(f"{ref.key}/model.safetensors").write_bytes(bytes(len(FILES["model.safetensors"])))
    with pytest.raises(Damaged, match=r"model\.safetensors"), proved_beside(store, ref, large=".safetensors"):
        raise ValueError("no safetensors")
    with pytest.raises(Damaged, match=r"model\.safetensors"), proved_beside(store, ref, large=".safetensors"):
        pass
    (store.local(f"{ref.key}/config.json")).write_bytes(b"[]")
    with pytest.raises(Damaged, match="config"), proved_beside(store, ref, large=".safetensors"):
        pytest.fail("its configuration was to be proved first")


def test_another_byte_or_name_gives_another_reference(store, policy, tmp_path):
    ref = publish_bundle(store, policy, prefix="policies")
    other_byte = make(tmp_path / "byte", {**FILES, "config.json": b"{ "})
    other_name = make(tmp_path / "name", {("config2.json" if n == "config.json" else n): d for n, d in FILES.items()})
    digests = {publish_bundle(store, directory, prefix="policies").digest for directory in (other_byte, other_name)}
    assert len(digests | {ref.digest}) == 3


@pytest.mark.parametrize("name", ["model.safetensors", "zero/rank_0.pt", "bundle.json"])
def test_a_flipped_bit_in_any_file_is_damage_that_names_it(store, policy, name):
    ref = publish_bundle(store, policy, prefix="policies")
    path = store.local(f"{ref.key}/{name}")
    data = path.read_bytes()
    path.write_bytes(data[:1] + bytes([data[1] ^ 4]) + data[2:])
    with pytest.raises(Damaged, match="expected digest") as caught:
        fetch_bundle(store, ref)
    assert name == "bundle.json" or name in str(caught.value)


def test_a_cut_missing_or_additional_file_is_damage_that_names_it(store, policy):
    ref = publish_bundle(store, policy, prefix="policies")
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
def test_a_link_in_place_of_a_file_is_damage_even_where_it_leads_to_the_same_bytes(store, policy, tmp_path, name):
    ref = publish_bundle(store, policy, prefix="policies")
    path = tmp_path / "run" / ref.key / name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert name in in_a_fresh_process(store, ref)
    with pytest.raises(Damaged, match=r"symbolic link|missing|found no file"):
        fetch_bundle(store, ref)
    with pytest.raises(Damaged, match="symbolic link"):
        fetch_file(store, ref, {"zero": "zero/rank_0.pt", "bundle.json": "config.json"}.get(name, name))


def test_publishing_a_damaged_bundle_again_mends_it(store, policy):
    ref = publish_bundle(store, policy, prefix="policies")
    for name in ("model.safetensors", "bundle.json"):
        store.local(f"{ref.key}/{name}").write_bytes(b"torn")
    assert publish_bundle(store, policy, prefix="policies") == ref
    assert in_a_fresh_process(store, ref) == ""


def test_a_bundle_without_its_table_of_contents_does_not_exist(store, policy):
    ref = publish_bundle(store, policy, prefix="policies")
    fetch_bundle(store, ref)
    store.delete(f"{ref.key}/bundle.json")
    with pytest.raises(Damaged, match=f"{ref.key}.*never completely published"):
        fetch_bundle(store, ref)


def test_a_deleted_bundle_leaves_no_file_and_can_be_published_again(store, policy):
    ref = publish_bundle(store, policy, prefix="policies")
    fetch_bundle(store, ref)
    delete_bundle(store, ref)
    delete_bundle(store, ref)
    assert store.entries("") == []
    with pytest.raises(Damaged):
        fetch_bundle(store, ref)
    assert publish_bundle(store, policy, prefix="policies") == ref
    assert files_of(fetch_bundle(store, ref)).keys() == FILES.keys() | {"bundle.json"}


@pytest.mark.parametrize("name", [".hidden", "a b", "x..y", "bundle.json", "-rf"])
def test_a_file_name_that_is_not_safe_is_refused_before_anything_is_written(store, tmp_path, name):
    with pytest.raises(BadInput):
        publish_bundle(store, make(tmp_path / "policy", {"ok": b"", name: b""}), prefix="policies")
    assert store.entries("") == []


def test_links_special_files_and_empty_directories_are_refused(store, tmp_path):
    outside = make(tmp_path / "outside", {"secret": b"key"})
    linked = make(tmp_path / "linked", {"ok": b""})
    (linked / "link").symlink_to(outside / "secret")
    folder = make(tmp_path / "folder", {"ok": b""})
    (folder / "link").symlink_to(outside)
    pipe = make(tmp_path / "pipe", {"ok": b""})
    os.mkfifo(pipe / "fifo")
    (tmp_path / "empty").mkdir()
    for directory in (linked, folder, pipe, tmp_path / "empty", tmp_path / "absent"):
        with pytest.raises(BadInput, match="expected"):
            publish_bundle(store, directory, prefix="policies")


def _publish_for_ever(uri, root, ready):
    store = open_store(uri)
    for number in range(1_000_000):
        files = {"a": os.urandom(200_000), "b": os.urandom(200_000)}
        publish_bundle(store, make(root / str(number), files), prefix="p")
        ready.set()


def test_every_bundle_that_exists_is_whole_when_its_publisher_is_killed(store, tmp_path):
    for attempt in range(4):
        ready = CONTEXT.Event()
        with process(_publish_for_ever, store.uri, tmp_path / f"source-{attempt}", ready):
            assert ready.wait(30)
            time.sleep(random.uniform(0.01, 0.08))
    published = [entry.key for entry in store.entries("p/") if entry.key.endswith("bundle.json")]
    for key in published:
        digest = blake3(store.read(key)).hexdigest()
        assert fetch_bundle(store, BundleRef(key=f"p/{digest[:16]}", digest=digest, bytes=400_000)).is_dir()
    assert len(published) >= 4
