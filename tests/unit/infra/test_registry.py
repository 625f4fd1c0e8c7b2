"""A registry's records: numbered without gaps whoever writes, one champion, and never another one than was written."""

from concurrent.futures import ThreadPoolExecutor
from shutil import copyfile

import pytest

from infra.errors import BadInput, Damaged
from infra.store.registry import RegistryRecord, known_registry, open_registry, registries


def record(number, champion, *, kind="promote", run="weekly"):
    return RegistryRecord(
        number=number, kind=kind, policy=f"{run}'s", run=run, iteration=3, previous=champion.number if champion else 0,
        reason="because", who="me", when="2026-11-23T00:00:00+00:00", version="1",
    )  # fmt: skip


@pytest.fixture
def registry(tmp_path):
    return open_registry(str(tmp_path), "assistant")


def test_twenty_concurrent_promotions_get_twenty_numbers_and_each_has_the_champion_before_it(registry):
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
        (lambda path: path.write_bytes(path.read_bytes().replace(b"because", b"becausE")), "expected seal"),
        (lambda path: path.write_bytes(path.read_bytes()[:100]), "expected sealed JSON"),
        (lambda path: path.unlink(), "record 1 is missing"),
        (lambda path: copyfile(path, path.with_name("000002.json")), "says that it is 1"),
    ],
    ids=["changed", "torn", "deleted", "copied"],
)
def test_a_changed_torn_deleted_or_copied_record_is_reported(registry, tmp_path, harm, message):
    registry.append(record)
    registry.append(record)
    harm(tmp_path / "registry/assistant/records/000001.json")
    with pytest.raises(Damaged, match=message):
        registry.records()


def test_a_registry_that_is_not_there_is_named_with_those_that_are(registry, tmp_path):
    registry.append(record)
    assert registries(str(tmp_path)) == ["assistant"]
    with pytest.raises(BadInput, match=r"registry 'asistant': expected one in .*, found assistant"):
        known_registry(str(tmp_path), "asistant")
