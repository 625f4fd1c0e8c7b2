"""Rescorings and recredits of stored rollouts: the chain that protects their records."""

import asyncio
from types import SimpleNamespace

import pytest

from infra.store.chain import check_chain
from infra.store.manifests import Manifest
from infra.store.runs import open_run
from tasks.rescoring import find_remaining_iterations
from tasks.run.rescorings import DerivedResult, link_completed_iterations, sealed_numbers


def commit_iteration(run, derived, number):
    run.commit(Manifest(key=derived.key(number, "scoring/0001")))
    run.commit(Manifest(key=derived.key(number, "seal"), metrics={"reward_mean": 0.5}))


@pytest.mark.parametrize("kind", ["rescore", "recredit"])
def test_a_rescoring_without_a_chain_is_read_and_gets_one_when_it_is_continued(run, tmp_path, kind):
    derived = DerivedResult(kind, "strict")
    run.commit(Manifest(key=derived.terms_key))
    for number in (1, 2):
        commit_iteration(run, derived, number)
    assert sealed_numbers(run, derived) == (1, 2) and [*check_chain(run)] == []
    opened = SimpleNamespace(run=run)
    assert [each.number for each in asyncio.run(find_remaining_iterations(opened, derived, (1, 2, 3)))] == [3]
    commit_iteration(run, derived, 3)
    link_completed_iterations(run, derived)
    assert [*check_chain(run)] == []
    records = sorted(tmp_path.glob(f"r/manifests/{kind}/strict/**/*.json"))
    assert len(records) == 7
    for path in records:
        whole = path.read_bytes()
        path.unlink()
        key = str(path.relative_to(tmp_path / "r/manifests").with_suffix(""))
        assert any(key in problem for problem in check_chain(open_run(str(tmp_path), "r"))), key
        path.write_bytes(whole)
