"""The records of a registry: numbered without gaps under concurrent writers, one champion, and no changed record."""

from concurrent.futures import ThreadPoolExecutor
from shutil import copyfile, rmtree

import pytest

from rheostat.flows.cli.app import main
from rheostat.infra.errors import BadInput, Damaged
from rheostat.infra.store.checksums import seal
from rheostat.infra.store.registry import RegistryRecord, open_existing_registry, open_registry, registries
from rheostat.infra.store.verify import verify_registry


def record(number, champion, *, kind="promote", run="weekly"):
    return RegistryRecord(
        number=number, kind=kind, policy=f"{run}'s", run=run, iteration=3, previous=champion.number if champion else 0,
        reason="because", who="me", when="2026-11-23T00:00:00+00:00", version="1",
    )  # fmt: skip


@pytest.fixture
def registry(tmp_path):
    return open_registry(str(tmp_path), "assistant")


def test_twenty_concurrent_promotions_get_twenty_numbers_and_name_their_previous_champions(registry):
    def promote(run):
        return registry.append(lambda number, champion: record(number, champion, run=f"run-{run}"))

    with ThreadPoolExecutor(20) as threads:
        written = list(threads.map(promote, range(20)))
    assert sorted(each.number for each in written) == list(range(1, 21))
    records = registry.records()
    assert [each.number for each in records] == list(range(1, 21))
    assert [each.previous for each in records] == list(range(20)), "nobody took the place of one it did not know"
    assert registry.champion() == records[-1]


def test_only_promotions_and_rollbacks_change_the_champion(registry):
    for kind in ("promote", "keep", "reject", "proposal", "invalid"):
        registry.append(lambda number, champion, kind=kind: record(number, champion, kind=kind))
    assert registry.champion().number == 1
    registry.append(lambda number, champion: record(number, champion, kind="rollback"))
    assert registry.champion().number == 6


def test_a_decision_without_a_record_writes_nothing(registry, tmp_path):
    assert registry.append(lambda number, champion: None) is None
    assert registry.records() == []
    assert not [*tmp_path.rglob("*.json")]


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes().replace(b"because", b"becausE")), "expected checksum"),
        (lambda path: path.write_bytes(path.read_bytes()[:100]), "expected JSON with a checksum"),
        (lambda path: path.unlink(), "record 1 is missing"),
        (lambda path: copyfile(path, path.with_name("000002.json")), "differs from the one that the chain names"),
    ],
    ids=["changed", "torn", "deleted", "copied"],
)
def test_a_changed_torn_deleted_or_copied_record_is_reported(registry, tmp_path, harm, message):
    registry.append(record)
    registry.append(record)
    harm(tmp_path / "registry/assistant/records/000001.json")
    with pytest.raises(Damaged, match=message):
        registry.records()


def test_a_deleted_or_replaced_newest_record_is_reported(registry, tmp_path):
    for run in ("first", "second"):
        registry.append(lambda number, champion, run=run: record(number, champion, run=run))
    path = tmp_path / "registry/assistant/records/000002.json"
    path.write_bytes(seal(record(2, None, run="forged").model_dump(mode="json")))
    assert ["differs from the one that the chain names" in problem for problem in verify_registry(registry)] == [True]
    path.unlink()
    for use in (registry.champion, registry.canary, lambda: registry.append(record)):
        with pytest.raises(Damaged, match=r"record 2 is missing. Restore 'records/000002.json'"):
            use()
    assert ["record 2 is missing" in problem for problem in verify_registry(registry)] == [True]


def test_a_deleted_or_edited_chain_entry_is_reported(registry, tmp_path):
    for _ in range(3):
        registry.append(record)
    path = tmp_path / "registry/assistant/chain/000002.json"
    for harm in (lambda: path.write_bytes(seal({"number": 2, "record": "", "previous": ""})), path.unlink):
        harm()
        (problem,) = verify_registry(registry)
        assert "'chain/000002.json'" in problem


def test_a_registry_without_a_chain_is_readable_and_protected_from_the_next_record_on(registry, tmp_path, capsys):
    """Registry of an older version, or one whose last writer was killed between a record and its chain entry."""
    for _ in range(2):
        registry.append(record)
    rmtree(tmp_path / "registry/assistant/chain")
    assert registry.champion().number == 2
    assert main(["verify", "assistant", "--store", str(tmp_path)]) == 0
    assert "record 2 is not protected yet" in capsys.readouterr().out
    registry.append(record)
    assert verify_registry(registry) == [] and registry.numbered.unprotected() == 0


def test_a_draft_whose_champion_has_no_record_is_reported(registry):
    registry.append(record)
    registry.store.put("retrains/weekly.json", seal({"run": "weekly", "champion": 2}))
    assert ["'retrains/weekly.json'" in problem for problem in verify_registry(registry)] == [True]


def test_an_unknown_registry_is_refused_with_the_names_of_existing_registries(registry, tmp_path):
    registry.append(record)
    assert registries(str(tmp_path)) == ["assistant"]
    with pytest.raises(BadInput, match=r"no registry 'asistant' in .*: assistant"):
        open_existing_registry(str(tmp_path), "asistant")
