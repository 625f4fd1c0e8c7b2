"""The champion as a directory: a symbolic link that always leads to all files of one policy."""

import os
from pathlib import Path
from unittest.mock import patch

import pytest

from infra.errors import StoreFailed
from infra.store.registry import Registry
from tasks.promotion import serving
from tasks.promotion.registry import rollback
from tests.support.champions import appended


@pytest.fixture
def link(tmp_path):
    return tmp_path / "models" / "current"


@pytest.fixture
def checkout(registry_command, link):
    """Run `rheostat checkout` into the link; return its exit code, output and error output."""
    return lambda *words, to=link: registry_command("checkout", "assistant", "--to", str(to), *words)


def test_the_link_follows_the_champion_and_open_files_stay_readable(registry, home, checkout, link, tmp_path):
    outputs = []
    for policy in "ab":
        appended(registry, tmp_path, policy)
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
    appended(registry, tmp_path, "a")
    monkeypatch.chdir(tmp_path)
    synced = set[int]()
    with patch("infra.store.disk.os.fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino)):
        assert checkout(to="models/current")[0] == 0
    assert Path("models/current").readlink().parent == Path()
    assert Path("models/current/model").read_text() == "a"
    paths = [*Path("models/current/").resolve().rglob("*"), Path("models")]
    assert {path.stat().st_ino for path in paths} <= synced


def test_the_previous_copy_stays_and_older_copies_are_deleted(registry, checkout, link, tmp_path):
    for policy in "abc":
        appended(registry, tmp_path, policy)
        checkout()
    copies = sorted((copy / "model").read_text() for copy in link.parent.glob(".current-*"))
    assert copies == ["b", "c"]


def test_the_canary_is_the_open_proposal_or_else_the_champion(registry, registry_command, checkout, link, tmp_path):
    def canary():
        assert checkout("--alias", "canary")[0] == 0
        return (link / "model").read_text()

    appended(registry, tmp_path, "a")
    appended(registry, tmp_path, "b", kind="proposal")
    assert canary() == "b"
    for _ in range(2):
        assert registry_command("refuse", "assistant", "run-b", "--reason", "made up sources")[0] == 0
    assert canary() == "a"
    appended(registry, tmp_path, "c", kind="proposal")
    assert registry_command("promote", "assistant", "run-c", "--reason", "an hour without complaints")[0] == 0
    assert canary() == "c"


def test_a_killed_checkout_leaves_the_old_policy_and_the_next_one_completes_it(registry, checkout, link, tmp_path):
    appended(registry, tmp_path, "a")
    checkout()
    appended(registry, tmp_path, "b")
    with patch.object(serving.shutil, "copytree", side_effect=KeyboardInterrupt):
        checkout()
    assert (link / "model").read_text() == "a"
    checkout()
    assert (link / "model").read_text() == "b"


def test_a_checkout_without_a_champion_or_onto_a_folder_is_refused(registry, checkout, link, tmp_path):
    appended(registry, tmp_path, "a", kind="proposal")
    code, _, err = checkout()
    assert code == 2 and "found no promotion" in err
    appended(registry, tmp_path, "a")
    link.mkdir(parents=True)
    code, _, err = checkout()
    assert code == 2 and f"{link}: expected a symbolic link or nothing, found a folder" in err


def test_a_follower_uses_each_champion_and_keeps_the_last_while_the_store_cannot_be_read(registry, tmp_path, caplog):
    appended(registry, tmp_path, "a")
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
            appended(registry, tmp_path, "b")
        return found(self)

    with patch.object(Registry, "champion", champion), pytest.raises(KeyboardInterrupt):
        serving.follow(registry, use, every=0.001)
    assert used == ["a", "a", "a", "b", "b"]
    assert caplog.text.count("the champion stays: the disk is gone") == 1
