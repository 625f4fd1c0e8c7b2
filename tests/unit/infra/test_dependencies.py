"""Dependencies of a run other than its configuration: stored with the run, compared, and changed only if accepted."""

import pytest

from rheostat.infra.errors import Damaged, RunChanged
from rheostat.infra.store.chain import Chain, check_chain
from rheostat.infra.store.checksums import seal
from rheostat.infra.store.dependencies import (
    DEPENDENCIES,
    Dependencies,
    FileContent,
    accepted_changes,
    check_dependencies,
    dependency_records,
    record_dependencies,
)
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import create_run, open_run
from rheostat.infra.store.verify import verify_store
from tests.support.jobs import files_of
from tests.support.stores import flip_bit


def build_dependencies(*, code="a" * 64, data="b" * 64, modified_ns=1, **libraries) -> Dependencies:
    return Dependencies(
        code={"reward mine:even": {"mine": code}},
        data={"p.jsonl": FileContent(digest=data, bytes=9, modified_ns=modified_ns)},
        libraries={"torch": "2.9.0"} | libraries,
    )


@pytest.fixture
def run(tmp_path):
    """Run that was created with `found()`."""
    run = create_run(str(tmp_path), "r", {"seed": 1})
    with run.lock():
        record_dependencies(run, build_dependencies(), iteration=1)
    return run


def refusal(run, now):
    with pytest.raises(RunChanged) as refused:
        check_dependencies(run, now)
    return str(refused.value)


def test_every_difference_is_reported_in_one_line_with_the_option_that_accepts_it(run):
    message = refusal(run, build_dependencies(code="c" * 64, data="d" * 64, torch="2.9.1", numpy="3"))
    differences = (
        "reward mine:even: module mine was aaaaaaaa, is cccccccc; "
        "data file p.jsonl has changed (was bbbbbbbb, 9 bytes; is now dddddddd, 9 bytes); numpy was none, is 3; "
        "torch was 2.9.0, is 2.9.1. "
    )
    assert differences in message and "--accept-change" in message and "\n" not in message
    many = build_dependencies(**{f"library{n}": "1" for n in range(9)})
    assert "library4 was none, is 1; and 4 more" in refusal(run, many)
    ranks = build_dependencies().model_copy(update={"layout": {"pools.update_ranks": 2}})
    assert "pools.update_ranks was none, is 2" in refusal(run, ranks)


def test_a_touched_or_missing_data_file_is_no_difference(run):
    check_dependencies(run, build_dependencies(modified_ns=2))
    check_dependencies(run, build_dependencies().model_copy(update={"data": {}}))


def test_a_change_that_is_not_accepted_is_not_recorded(run):
    before = files_of(run.store.root)
    with run.lock(), pytest.raises(RunChanged):
        record_dependencies(run, build_dependencies(torch="2.9.1"), iteration=2)
    after = files_of(run.store.root)
    assert {*after} - {*before} == {"lease/000002.json"}


def test_an_accepted_change_is_recorded_and_later_starts_are_compared_with_the_new_record(run):
    with run.lock():
        for _ in range(2):  # the second finds nothing new
            record_dependencies(run, build_dependencies(torch="2.9.1"), iteration=3, accept_change=True)
    assert [record.iteration for record in dependency_records(run)] == [1, 3]
    check_dependencies(run, build_dependencies(torch="2.9.1"))
    assert "torch was 2.9.1, is 2.9.0" in refusal(run, build_dependencies())
    (change,) = accepted_changes(run)
    assert (change.iteration, change.changes) == (3, ["torch was 2.9.0, is 2.9.1"])


def test_a_run_of_an_older_rheostat_is_compared_from_its_next_start_on(tmp_path):
    run = create_run(str(tmp_path), "old", {"seed": 1})
    check_dependencies(run, build_dependencies())
    with run.lock():
        record_dependencies(run, build_dependencies(), iteration=7)
    assert accepted_changes(run) == []
    assert "torch" in refusal(run, build_dependencies(torch="3"))


def test_a_changed_or_lost_record_of_dependencies_is_found(run):
    with run.lock():
        run.commit(Manifest(key="it-0001/seal"))
        Chain(run).link("it-0001")
        record_dependencies(run, build_dependencies(torch="2.9.1"), iteration=2, accept_change=True)
        run.commit(Manifest(key="it-0002/seal"))
        Chain(run).link("it-0002", journal=[DEPENDENCIES])
    assert verify_store(run) == []
    for number in (1, 2):
        path = run.store.local_path(f"journal/dependencies/{number:04d}.json")
        whole = path.read_bytes()
        path.write_bytes(seal({**run.journal(DEPENDENCIES)[f"dependencies/{path.stem}"], "iteration": 5}))
        assert any(f"journal/dependencies/{path.name}" in problem for problem in check_chain(run))
        path.write_bytes(whole)
        flip_bit(path)
        assert any(path.name in problem for problem in verify_store(run))
        path.unlink()
        assert any(f"journal/dependencies/{path.name}" in problem for problem in check_chain(run))
        path.write_bytes(whole)
    assert verify_store(run) == []


def test_a_sealed_record_without_the_fields_of_dependencies_is_damage(run):
    run.store.local_path("journal/dependencies/0001.json").write_bytes(seal({"iteration": 1}))
    with pytest.raises(Damaged, match="not a valid record of dependencies"):
        dependency_records(open_run(str(run.store.root.parent), "r"))
