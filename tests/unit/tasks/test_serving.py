"""The champion as a directory: a symbolic link that always points to all files of one policy."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest

from rheostat.infra.errors import StoreFailed
from rheostat.infra.store.bundles import fetch_bundle
from rheostat.infra.store.registry import Registry
from rheostat.tasks.promotion import serving
from rheostat.tasks.promotion.registry import rollback
from tests.support.champions import append_record


@pytest.fixture
def link(tmp_path):
    return tmp_path / "models" / "current"


@pytest.fixture
def checkout(registry_command, link):
    """Function that runs `rheostat checkout` into the link and returns exit code, stdout and stderr."""
    return lambda *words, to=link: registry_command("checkout", "assistant", "--to", str(to), *words)


def test_the_link_follows_the_champion_and_open_files_stay_readable(registry, home, checkout, link, tmp_path):
    outputs = []
    for policy in "ab":
        append_record(registry, tmp_path, policy)
        outputs.append(checkout()[:2])
        assert (link / "model").read_text() == policy
    with (link / "model").open() as opened:
        rollback(home, "assistant", to=None, reason="it refuses too often")
        outputs += [checkout()[:2] for _ in range(2)]
        assert opened.read() == "b"
    assert (link / "model").read_text() == "a"
    records = [line.rpartition(", ")[2] for _, out in outputs for line in out.splitlines()]
    assert [code for code, _ in outputs] == [0] * 4
    assert records == ["record 1", "record 2", "record 3"], "the fourth checkout changed nothing"


def test_a_relative_link_is_created_whose_files_are_durable(registry, checkout, tmp_path, monkeypatch):
    append_record(registry, tmp_path, "a")
    monkeypatch.chdir(tmp_path)
    synced = set[int]()
    with patch("rheostat.infra.store.disk.os.fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino)):
        assert checkout(to="models/current")[0] == 0
    assert Path("models/current").readlink().parent == Path()
    assert Path("models/current/model").read_text() == "a"
    paths = [*Path("models/current/").resolve().rglob("*"), Path("models")]
    assert {path.stat().st_ino for path in paths} <= synced


def test_the_previous_copy_stays_and_older_copies_are_deleted(registry, checkout, link, tmp_path):
    for policy in "abc":
        append_record(registry, tmp_path, policy)
        checkout()
    copies = sorted((copy / "model").read_text() for copy in link.parent.glob(".current-*"))
    assert copies == ["b", "c"]


def test_files_that_no_checkout_created_stay_next_to_the_link(registry, checkout, link, tmp_path):
    neighbours = [".current-notes", ".current-new-features", f".current-{'0' * 16}", ".current-old-link"]
    for name in neighbours[:3]:
        (link.parent / name).mkdir(parents=True)
        (link.parent / name / "bundle.json").write_text("mine")
    (link.parent / neighbours[3]).symlink_to(neighbours[0])
    for policy in "abc":
        append_record(registry, tmp_path, policy)
        assert checkout()[0] == 0
        (link.resolve() / "mine").write_text("added by a user")
    append_record(registry, tmp_path, "d")
    assert checkout()[0] == 0
    assert all((link.parent / name / "bundle.json").read_text() == "mine" for name in neighbours)
    assert len(list(link.parent.glob(".current-*"))) == len(neighbours) + 4, "copies with a user's file stay too"


def test_checkouts_at_the_same_time_take_turns(registry, link, tmp_path):
    policies = [
        (record := append_record(registry, tmp_path, name), fetch_bundle(registry.store, record.bundle))
        for name in "abcd"
    ]
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda number: serving.update_link(*policies[number % 4], link), range(16)))
    assert (link / "model").read_text() in "abcd"
    assert len(list(link.parent.glob(".current-*"))) == 2


@pytest.mark.parametrize("name", [".current.checkout", "copy"])
def test_a_checkout_does_not_replace_a_file_with_the_name_of_its_copy_or_scratch_directory(
    registry, checkout, link, tmp_path, name
):
    record = append_record(registry, tmp_path, "a")
    taken = link.parent / (f".current-{record.bundle.digest[:16]}" if name == "copy" else name)
    taken.mkdir(parents=True)
    (taken / "notes").write_text("mine")
    code, _, err = checkout()
    assert code == 2 and str(taken) in err and "Move it away" in err
    assert (taken / "notes").read_text() == "mine" and not link.exists()


def test_the_canary_is_the_open_proposal_or_else_the_champion(registry, registry_command, checkout, link, tmp_path):
    def canary():
        assert checkout("--alias", "canary")[0] == 0
        return (link / "model").read_text()

    append_record(registry, tmp_path, "a")
    append_record(registry, tmp_path, "b", kind="proposal")
    assert canary() == "b"
    for _ in range(2):
        assert registry_command("refuse", "assistant", "run-b", "--reason", "made up sources")[0] == 0
    assert canary() == "a"
    append_record(registry, tmp_path, "c", kind="proposal")
    assert registry_command("promote", "assistant", "run-c", "--reason", "an hour without complaints")[0] == 0
    assert canary() == "c"


def test_a_killed_checkout_leaves_the_old_policy_and_the_next_one_completes_it(registry, checkout, link, tmp_path):
    append_record(registry, tmp_path, "a")
    checkout()
    append_record(registry, tmp_path, "b")
    with patch.object(serving.shutil, "copytree", side_effect=KeyboardInterrupt):
        checkout()
    assert (link / "model").read_text() == "a"
    checkout()
    assert (link / "model").read_text() == "b"


def test_a_checkout_without_a_champion_or_onto_a_folder_is_refused(registry, checkout, link, tmp_path):
    append_record(registry, tmp_path, "a", kind="proposal")
    code, _, err = checkout()
    assert code == 2 and "no champion yet" in err
    append_record(registry, tmp_path, "a")
    link.mkdir(parents=True)
    code, _, err = checkout()
    assert code == 2 and f"{link} must be a symbolic link or not exist, but it is a folder" in err


def test_a_follower_uses_each_champion_and_keeps_the_last_while_the_store_cannot_be_read(registry, tmp_path, caplog):
    append_record(registry, tmp_path, "a")
    used: list[str] = []
    lost = iter([False, True, True, False])

    def use(champion, files):
        used.append((files / "model").read_text())
        if len(used) == 5:
            raise KeyboardInterrupt

    def champion(self, found=Registry.champion):
        if next(lost, False):
            raise StoreFailed("the disk is gone")
        if len(used) == 3:
            append_record(registry, tmp_path, "b")
        return found(self)

    with patch.object(Registry, "champion", champion), pytest.raises(KeyboardInterrupt):
        serving.watch_policy(registry, use, every=0.001)
    assert used == ["a", "a", "a", "b", "b"]
    assert caplog.text.count("the policy is not changed: the disk is gone") == 1
