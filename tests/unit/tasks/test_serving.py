"""The champion as a directory: a link that always leads to the whole files of one policy."""

import os
from pathlib import Path
from unittest.mock import patch

import pytest

from flows.cli.app import main
from infra.errors import StoreFailed
from infra.store.registry import Registry, open_registry
from tasks.promotion import serving
from tasks.promotion.registry import rollback
from tests.support.champions import appended


@pytest.fixture
def registry(tmp_path):
    return open_registry(str(tmp_path / "store"), "assistant")


@pytest.fixture
def link(tmp_path):
    return tmp_path / "models" / "current"


def checkout(registry, link):
    """Give the command once; return its exit code."""
    return main(
        ["checkout", registry.name, "--to", str(link), "--store", registry.store.uri.rpartition("/registry/")[0]]
    )


def test_a_link_turns_to_the_champion_and_back_and_open_files_stay(registry, link, tmp_path, capsys):
    for policy in "ab":
        appended(registry, tmp_path, policy)
        assert checkout(registry, link) == 0
        assert (link / "model").read_text() == policy
    with (link / "model").open() as opened:
        rollback(registry.store.uri.rpartition("/registry/")[0], registry.name, to=None, reason="it refuses too often")
        assert [checkout(registry, link) for _ in range(2)] == [0, 0]
        assert opened.read() == "b"
    assert (link / "model").read_text() == "a"
    said = capsys.readouterr().out.splitlines()
    assert [line.rpartition(", ")[2] for line in said] == ["record 1", "record 2", "record 3"], "a fourth moved nothing"


def test_a_relative_link_is_made_whose_files_survive_a_power_cut(registry, tmp_path, monkeypatch):
    appended(registry, tmp_path, "a")
    monkeypatch.chdir(tmp_path)
    synced = set[int]()
    with patch("infra.store.disk.os.fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino)):
        assert checkout(registry, Path("models/current")) == 0
    assert Path("models/current").readlink().parent == Path()
    assert Path("models/current/model").read_text() == "a"
    made = [*Path("models/current/").resolve().rglob("*"), Path("models")]
    assert {path.stat().st_ino for path in made} <= synced


def test_the_copy_before_stays_and_older_ones_go(registry, link, tmp_path):
    for policy in "abc":
        appended(registry, tmp_path, policy)
        checkout(registry, link)
    copies = sorted((copy / "model").read_text() for copy in link.parent.glob(".current-*"))
    assert copies == ["b", "c"]


def test_the_canary_is_the_proposal_that_waits_and_the_champion_once_that_is_refused(registry, link, tmp_path):
    appended(registry, tmp_path, "a")
    store = ("--store", registry.store.uri.rpartition("/registry/")[0])
    check = ["checkout", "assistant", "--to", str(link), "--alias", "canary", *store]
    appended(registry, tmp_path, "b", kind="proposal")
    assert main(check) == 0 and (link / "model").read_text() == "b"
    for _ in range(2):
        assert main(["refuse", "assistant", "run-b", "--reason", "made up sources", *store]) == 0
    assert main(check) == 0 and (link / "model").read_text() == "a"
    appended(registry, tmp_path, "c", kind="proposal")
    assert main(["promote", "assistant", "run-c", "--reason", "an hour without complaints", *store]) == 0
    assert main(check) == 0 and (link / "model").read_text() == "c"


def test_a_checkout_that_is_killed_before_the_link_turns_leaves_the_old_policy_and_the_next_one_ends_it(
    registry, link, tmp_path
):
    appended(registry, tmp_path, "a")
    checkout(registry, link)
    appended(registry, tmp_path, "b")
    with patch.object(serving.shutil, "copytree", side_effect=KeyboardInterrupt):
        checkout(registry, link)
    assert (link / "model").read_text() == "a"
    checkout(registry, link)
    assert (link / "model").read_text() == "b"


def test_what_is_no_link_is_left_alone(registry, link, tmp_path, capsys):
    appended(registry, tmp_path, "a")
    link.mkdir(parents=True)
    assert checkout(registry, link) == 2
    assert f"{link}: expected a symbolic link or nothing, found a folder" in capsys.readouterr().err


def test_before_the_first_promotion_there_is_nothing_to_check_out(registry, link, tmp_path, capsys):
    appended(registry, tmp_path, "a", kind="proposal")
    assert checkout(registry, link) == 2
    assert "expected a champion, found no promotion" in capsys.readouterr().err


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
