"""The chain of a run: later records reveal records that were deleted or replaced, even with a valid seal."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rheostat.infra.errors import Damaged
from rheostat.infra.store.chain import Chain, check_chain, complete_manifests, linked_parts
from rheostat.infra.store.checksums import seal
from rheostat.infra.store.local import LocalStore
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import create_run, open_run


@pytest.fixture
def root(tmp_path):
    """Run of two evaluations and two iterations, all of them in its chain."""
    with create_run(str(tmp_path), "r", {"seed": 1}).lock() as run:
        chain = Chain(run)
        run.commit(Manifest(key="policy/base"))
        for part in ("eval-0000", "it-0001", "it-0002", "eval-0002"):
            run.commit(Manifest(key=f"{part}/plan"))
            run.write_entry(f"placement/{part}/stage", {"seconds": 1.5})
            run.commit(Manifest(key=f"{part}/last", metrics={"accuracy": 0.5}))
            chain.link(part, journal=[f"placement/{part}/"])
    return tmp_path


def problems(root):
    return [*check_chain(open_run(str(root), "r"))]


def test_an_undamaged_chain_has_no_problems_and_each_part_is_linked_once(root):
    assert problems(root) == []
    run = open_run(str(root), "r")
    assert linked_parts(run) == ["eval-0000", "it-0001", "it-0002", "eval-0002"]
    with run.lock():
        Chain(run).link("it-0001")
    assert len(linked_parts(run)) == 4


def test_a_process_reads_the_chain_once_and_appends_after_the_last_record(root, monkeypatch):
    looked = []
    children = LocalStore.children
    monkeypatch.setattr(LocalStore, "children", lambda store, folder: looked.append(folder) or children(store, folder))
    with open_run(str(root), "r").lock() as run:
        chain = Chain(run)
        for number in range(3, 9):
            run.commit(Manifest(key=f"it-{number:04d}/seal"))
            chain.link(f"it-{number:04d}")
            chain.link(f"it-{number:04d}")
    assert looked.count("chain") == 1
    assert linked_parts(run)[3:] == ["eval-0002", *(f"it-{number:04d}" for number in range(3, 9))]
    assert problems(root) == []


def test_every_deleted_manifest_and_journal_entry_is_reported(root):
    home = root / "r"
    found = [*home.glob("manifests/**/*.json"), *home.glob("journal/**/*.json")]
    assert len(found) == 13
    for path in found:
        whole = path.read_bytes()
        path.unlink()
        key = str(path.relative_to(home)).removeprefix("manifests/")
        key = key if key.startswith("journal/") else key.removesuffix(".json")
        assert any(repr(key) in problem for problem in problems(root)), path
        path.write_bytes(whole)


def test_an_edited_accuracy_with_a_valid_seal_is_reported(root):
    fingerprint = open_run(str(root), "r").record.fingerprint
    edited = Manifest(key="eval-0002/last", metrics={"accuracy": 0.9}, run=fingerprint)
    (root / "r/manifests/eval-0002/last.json").write_bytes(edited.encode())
    (problem,) = problems(root)
    assert "'eval-0002/last'" in problem


def test_the_successor_of_a_deleted_or_edited_chain_record_reveals_the_damage(root):
    links = sorted((root / "r/chain").iterdir())
    for path in links[:-1]:
        whole = path.read_bytes()
        path.unlink()
        assert problems(root), path
        path.write_bytes(seal({"part": "it-0009", "follows": "", "previous": "", "manifests": {}, "journal": {}}))
        assert problems(root), path
        path.write_bytes(whole)
    assert problems(root) == []


def test_foreign_files_are_ignored_and_the_chain_continues_after_a_lost_or_malformed_record(root):
    home = root / "r/chain"
    (home / ".DS_Store").write_bytes(b"x")
    (home / "notes.txt").write_bytes(b"x")
    assert problems(root) == []
    (home / "000002-it-0001.json").unlink()
    with open_run(str(root), "r").lock() as run:
        Chain(run).link("it-0003")
    assert sorted(path.name for path in home.glob("0*"))[-1] == "000005-it-0003.json"
    (problem,) = problems(root)
    assert "'chain/000002-it-0001.json'" in problem
    (home / "000002-it-0001.json").write_bytes(seal({"part": "it-0001"}))
    (problem,) = problems(root)
    assert "'chain/000002-it-0001.json'" in problem and "not a valid record of the chain" in problem


def test_records_appended_by_two_threads_at_once_form_one_sequence(tmp_path, monkeypatch):
    run = create_run(str(tmp_path), "r", {})
    with run.lock():
        chain = Chain(run)
        chain.link("it-0001")
        listed = run.manifests
        monkeypatch.setattr(run, "manifests", lambda prefix: [time.sleep(0.05), *listed(prefix)][1:])
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(chain.link, ["it-0002", "eval-0002"]))
        monkeypatch.undo()
    assert sorted(linked_parts(run)) == ["eval-0002", "it-0001", "it-0002"]
    assert problems(tmp_path) == []


@pytest.fixture
def rescored(root):
    """The run with two rescorings, each with a chain of two iterations."""
    with open_run(str(root), "r").lock() as run:
        for name in ("long", "short"):
            below = f"rescore/{name}/"
            run.commit(Manifest(key=f"{below}terms"))
            run.write_entry(f"{below}dependencies/0001", {"iteration": 1})
            for part in ("it-0001", "it-0002"):
                run.commit(Manifest(key=f"{below}{part}/seal", metrics={"reward_mean": 0.5}))
                Chain(run, below).link(part, journal=[f"{below}dependencies/"])
    return root


def test_each_chain_below_a_prefix_begins_with_all_records_below_it(rescored):
    run, home = open_run(str(rescored), "r"), rescored / "r/chain"
    assert linked_parts(run) == ["eval-0000", "it-0001", "it-0002", "eval-0002"] and problems(rescored) == []
    assert sorted(path.name for path in (home / "rescore/short").iterdir()) == [
        "000001-it-0001.json",
        "000002-it-0002.json",
    ]
    first = json.loads((home / "rescore/short/000001-it-0001.json").read_text())
    assert {*first["manifests"]} == {"rescore/short/terms", "rescore/short/it-0001/seal"}
    assert {*first["journal"]} == {"rescore/short/dependencies/0001"}


@pytest.mark.parametrize("name", ["long", "short"])
def test_every_deleted_record_of_a_rescoring_is_reported_also_the_newest(rescored, name):
    home, below = rescored / "r", f"rescore/{name}"
    found = [*home.glob(f"manifests/{below}/**/*.json"), *home.glob(f"journal/{below}/**/*.json")]
    assert len(found) == 4
    for path in [*found, home / f"chain/{below}/000001-it-0001.json"]:
        whole = path.read_bytes()
        path.unlink()
        named = str(path.relative_to(home)).removeprefix("manifests/").removesuffix(".json")
        assert any(named in problem for problem in problems(rescored)), path
        with pytest.raises(Damaged, match=f"{below}/"):
            complete_manifests(open_run(str(rescored), "r"))
        path.write_bytes(whole)
    assert problems(rescored) == []


def test_an_edited_newest_record_of_a_rescoring_with_a_valid_seal_is_reported(rescored):
    key, fingerprint = "rescore/short/it-0002/seal", open_run(str(rescored), "r").record.fingerprint
    edited = Manifest(key=key, metrics={"reward_mean": 0.9}, run=fingerprint)
    (rescored / f"r/manifests/{key}.json").write_bytes(edited.encode())
    (problem,) = problems(rescored)
    assert repr(key) in problem
